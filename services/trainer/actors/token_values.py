"""The store of token values, on a thread of its own, and its end at training.

Owns what happens to values between a committed step and a reader. Training does not wait: it puts
them into a bounded mailbox. Values for which the mailbox is full, or whose write fails, are lost
and counted. A rewind removes the values of the steps that it takes back, and age all others.

Shapes: t tokens of a turn.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, ClassVar

from torch import Tensor

from forge.core.errors import ActorStopped, MailboxFull
from forge.rl.losses.token_values import COLUMNS, TokenValues
from forge.runtime.actors.actor import ThreadActor
from forge.runtime.actors.actor_system import ActorRef
from forge.runtime.telemetry import log
from forge.v1 import trainer_pb2 as pb
from services.trainer import metrics
from services.trainer.reporting.token_value_files import StepValues, TokenValueFiles, TurnValues
from services.trainer.samples.chosen_turns import chosen_numbers
from services.trainer.samples.samples import BatchSamples
from services.trainer.setting_tables import TokenValuesSettings

DIRECTORY = "token-values"
"""In `checkpoint.dir`."""
EXPIRY_S = 600.0
"""Between two removals by age, also while no step is taken."""
PIECE_TOKENS = 32_768
"""Tokens of one response, which has 17 bytes for each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreValues:
    """Store the values of a committed step."""

    values: StepValues


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgetAfter:
    """Remove the values of later steps."""

    step: int


@dataclass(frozen=True, slots=True)
class Expire:
    """Remove the values beyond the age."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadValues:
    """Answered by the responses of FetchTokenValues. Raises `NotFound` and `DataLoss`."""

    trajectory_id: str


class TokenValueStore(ThreadActor):
    """Writes, removes and reads the files."""

    mailbox_size: ClassVar[int] = 32
    """Values of a step take up to 10 bytes a token."""

    def __init__(self, directory: Path, settings: TokenValuesSettings) -> None:
        self._files = TokenValueFiles(
            directory,
            most_bytes=settings.max_mib * (1 << 20),
            most_age_s=settings.max_age_h * 3600 or math.inf,
        )
        self._failing = False
        """The last write failed; this was logged."""

    def started(self) -> None:
        """Reads the headers of the stored steps."""
        try:
            self._files.open()
        except OSError as error:
            log.warning("token_values_not_listed", error=str(error))

    def receive(self, message: Any) -> Any:
        """Handles `StoreValues`, `ForgetAfter`, `Expire` and `ReadValues`."""
        match message:
            case StoreValues(values=values):
                self._keep(values)
            case ForgetAfter(step=step):
                self._files.forget_after(step)
            case Expire():
                self._files.expire()
            case ReadValues(trajectory_id=trajectory_id):
                return responses(self._files.read(trajectory_id))
            case _:
                return super().receive(message)
        metrics.TOKEN_VALUE_BYTES.set(self._files.size_bytes)
        return None

    def _keep(self, values: StepValues) -> None:
        try:
            self._files.write(values)
        except OSError as error:
            metrics.TOKEN_VALUES_LOST.labels("disk").inc()
            if not self._failing:
                log.warning("token_values_not_stored", step=values.step, error=str(error))
            self._failing = True
        else:
            self._failing = False


class KeptTokenValues:
    """Training's end of the store."""

    def __init__(
        self,
        store: ActorRef | None = None,
        settings: TokenValuesSettings = TokenValuesSettings(),  # noqa: B008 - frozen
    ) -> None:
        """Without a store no values are kept."""
        self._store = store
        self._settings = settings
        self._rewind: int | None = None
        """Step of a rewind that the store does not know yet."""

    def chosen(self, batch: BatchSamples, *, step: int) -> tuple[int, ...]:
        """Numbers of the samples whose values are to be stored; the same for the same step."""
        most = self._settings.tokens_per_step if self._store is not None else 0
        return chosen_numbers(batch.sizes, most, rng=Random(step)) if most else ()

    def keep(self, values: TokenValues, batch: BatchSamples, *, step: int, version: int) -> None:
        """Hand over the values of a committed step, whose weights before were those of `version`.
        Never waits."""
        if not values.numbers:
            return
        stored = StepValues(
            step=step,
            weight_version=version,
            turns=[batch.turns[number] for number in values.numbers],
            lengths=values.lengths,
            columns=values.columns,
        )
        if not (self._sent_rewind() and self._tell(StoreValues(values=stored))):
            metrics.TOKEN_VALUES_LOST.labels("busy").inc()

    def rewound(self, step: int) -> None:
        """Training continues after `step`. Never waits."""
        self._rewind = step
        self._sent_rewind()

    def _sent_rewind(self) -> bool:
        """Before values of the new lineage: they would be removed."""
        if self._rewind is not None and self._tell(ForgetAfter(step=self._rewind)):
            self._rewind = None
        return self._rewind is None

    def _tell(self, message: StoreValues | ForgetAfter) -> bool:
        try:
            if self._store is not None:
                self._store.tell(message)
        except (MailboxFull, ActorStopped):
            return False
        return True


async def expire(store: ActorRef) -> None:
    """Remove values by age, until cancelled."""
    while True:
        with suppress(MailboxFull, ActorStopped):
            store.tell(Expire())
        await asyncio.sleep(EXPIRY_S)


def responses(turns: Sequence[TurnValues]) -> list[pb.FetchTokenValuesResponse]:
    """The values of turns, in pieces."""
    found = []
    for turn in turns:
        for first in range(0, turn.columns.shape[1], PIECE_TOKENS):
            columns = turn.columns[:, first : first + PIECE_TOKENS]
            *floats, flags = COLUMNS
            response = pb.FetchTokenValuesResponse(
                turn_index=turn.turn_index,
                first=first,
                step=turn.step,
                weight_version=turn.weight_version,
                flags=columns[COLUMNS.index(flags)].byte().numpy().tobytes(),
            )
            for row, name in enumerate(floats):
                setattr(response, name, _float32_bytes(columns[row]))
            found.append(response)
    return found


def _float32_bytes(column_t: Tensor) -> bytes:
    data: bytes = column_t.float().numpy().astype("<f4").tobytes()
    return data
