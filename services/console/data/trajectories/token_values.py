"""Values of trained tokens beside the tokens of a turn's sequence: from the trainer's store.

Owns the columns of the page and a short memory of the trainer's answers. Without the trainer a page
shows tokens without colors: tokens are another request.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from forge.client.stored.token_values import CLIPPED, MASKED, TurnValues
from forge.core.errors import ForgeError, NotFound
from forge.v1 import common_pb2 as pb
from services.console.data.trajectories.token_rows import spans_of

FRESH_S = 15.0
"""Age at which an answer is read again: the trajectory may have been trained since."""
MOST_KEPT = 8
"""Trajectories in memory."""
NOT_STORED = (
    "The trainer stores no values of this trajectory: it was not trained yet, was not chosen "
    "(token_values.tokens_per_step), or its step is older than the store."
)

Values = Mapping[int, TurnValues]


@dataclass(frozen=True, slots=True)
class _CachedValues:
    values: Values
    note: str
    read_s: float


class TokenValuesCache:
    """The last answers of the trainer, also failures: no page asks it twice in a moment."""

    def __init__(
        self,
        read: Callable[[str], Awaitable[Values]],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read = read
        self._clock = clock
        self._answers: OrderedDict[str, _CachedValues] = OrderedDict()
        self._reading = asyncio.Lock()

    async def get(self, trajectory_id: str) -> tuple[Values, str]:
        """Return the values of a trajectory by turn, and why there are none, or ""."""
        async with self._reading:
            answer = self._answers.get(trajectory_id)
            if answer is None or self._clock() - answer.read_s >= FRESH_S:
                answer = await self._fetched(trajectory_id)
                self._answers[trajectory_id] = answer
                if len(self._answers) > MOST_KEPT:
                    self._answers.popitem(last=False)
            self._answers.move_to_end(trajectory_id)
            return answer.values, answer.note

    async def _fetched(self, trajectory_id: str) -> _CachedValues:
        try:
            values, note = await self._read(trajectory_id), ""
        except NotFound:
            values, note = {}, NOT_STORED
        except ForgeError as error:
            values, note = {}, f"The trainer's values cannot be read: {error}"
        return _CachedValues(values, note, self._clock())


def value_rows(
    one: pb.Trajectory, turn_index: int, values: Values, note: str, *, first: int, count: int
) -> dict[str, Any]:
    """Columns of `count` tokens from `first` on, beside those of `token_rows`, which raises the
    same errors; null for prompt tokens and tokens without values. `turns` are the stored turns of
    the sequence, each with its step and weight version."""
    names = ("logprobs", "log_ratios", "entropies", "advantages")
    columns: dict[str, list[float | None]] = {name: [] for name in names}
    flags: list[int | None] = []
    stored: dict[int, list[int]] = {}
    for turn, low, high in spans_of(one, turn_index, first=first, count=count):
        turn_values = values.get(turn) if turn >= 0 else None
        # A turn that was trained has values for all of its sampled tokens.
        if turn_values is None or len(turn_values.flags) < high:
            for column in columns.values():
                column.extend([None] * (high - low))
            flags += [None] * (high - low)
            continue
        stored[turn] = [turn_values.step, turn_values.weight_version]
        for name, column in columns.items():
            column.extend(map(_rounded, getattr(turn_values, name)[low:high]))
        flags += turn_values.flags[low:high]
    return {
        "first": first,
        "note": note,
        "turns": stored,
        **columns,
        "clipped": [None if one is None else bool(one & CLIPPED) for one in flags],
        "masked": [None if one is None else bool(one & MASKED) for one in flags],
    }


def _rounded(value: float) -> float | None:
    # JSON has no other numbers.
    return round(value, 4) if math.isfinite(value) else None
