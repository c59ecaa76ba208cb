"""The curves: metrics of every optimizer step, followed from the trainer.

Keeps a bounded number of steps: beyond it, every second one of the older half is left out.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import ClassVar

from forge.core.errors import ForgeError
from forge.v1 import trainer_pb2
from services.console.data.topics import Cursor, News, Topic, encode
from services.console.metrics import READS

FIELDS = (
    *("step", "weight_version", "loss", "mean_reward", "clip_fraction", "entropy", "grad_norm"),
    *("staleness_mean", "staleness_max", "logprob_gap_mean", "logprob_gap_p99"),
    *("inference_gap_mean", "merge_ratio", "step_s", "wait_s", "publish_s", "yield_j"),
    *("trained_tokens_per_s", "trained_tokens", "masked_fraction", "behavior_kl", "run_s"),
    *("yield_tokens_per_s", "yield_gain"),
)
"""Columns of a row, by the names of `StepMetrics`; `MAPS` follow."""
MAPS = ("reward_components", "reward_by_domain")
"""The last columns: objects by name."""
AGAIN_S = 1.0

Row = list[object]


class Steps(Topic):
    """All steps of the present lineage."""

    name: ClassVar[str] = "steps"

    def __init__(
        self,
        news: News,
        tail: Callable[[int], AsyncIterator[trainer_pb2.StepMetrics]],
        *,
        most: int,
    ) -> None:
        """`tail` yields the steps after a step, without end."""
        super().__init__(news)
        self._tail = tail
        self._most = most
        self._rows: list[Row] = []
        self._epoch = 1
        """Counts changes of rows that pages may have."""

    def since(self, cursor: Cursor) -> tuple[bytes | None, Cursor]:
        """New rows; all of them after rows were dropped."""
        now = (self._epoch, len(self._rows))
        if cursor == now:
            return None, cursor
        anew = cursor[0] != self._epoch
        rows = self._rows[0 if anew else cursor[1] :]
        event = {"anew": anew, "fields": (*FIELDS, *MAPS) if anew else (), "rows": rows}
        return encode(event), now

    async def run(self) -> None:
        """Follows from the first watch on: between two steps the stream costs the trainer
        nothing."""
        await self._watched.wait()
        while True:
            try:
                async for metrics in self._tail(self._last()):
                    self.add(metrics)
            except ForgeError:
                READS.labels(self.name, "failed").inc()
            await asyncio.sleep(AGAIN_S)

    def add(self, metrics: trainer_pb2.StepMetrics) -> None:
        """Add a step; one that was repeated after a restore replaces the steps from it on."""
        while self._rows and self._last() >= metrics.step:
            self._rows.pop()
            self._epoch += 1
        row: Row = [getattr(metrics, field) for field in FIELDS]
        self._rows.append([*row, *(dict(getattr(metrics, name)) for name in MAPS)])
        if len(self._rows) > self._most:
            half = len(self._rows) // 2
            self._rows = self._rows[:half:2] + self._rows[half:]
            self._epoch += 1
        READS.labels(self.name, "ok").inc()
        self._news.tell()

    def _last(self) -> int:
        step = self._rows[-1][0] if self._rows else 0
        assert isinstance(step, int)
        return step
