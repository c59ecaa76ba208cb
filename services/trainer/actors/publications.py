"""Publication beside training: a step waits for the copy of the weights alone.

Digests and announcement of one version run while the next step computes. Owns the publication in
progress, one at a time: host memory has room for the copy that is published and the next one. Not
here: the version counter and etcd (`published.publisher`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from forge.core.errors import Unavailable
from forge.runtime.concurrency.tasks import cancel_and_wait
from forge.runtime.telemetry import log
from services.trainer import metrics
from services.trainer.actors.learner import TakeSnapshot
from services.trainer.leadership.lineage import Lineage
from services.trainer.published.publisher import Publisher, Snapshot
from services.trainer.reporting.run_record import TrainingRecord


class Publications:
    """The publications of one run."""

    def __init__(
        self,
        record: TrainingRecord,
        lineage: Lineage,
        *,
        make_publisher: Callable[[int], Publisher],
        copy: Callable[[TakeSnapshot], Awaitable[Snapshot]],
    ) -> None:
        """`make_publisher` takes the highest weight version that may be in use; `copy` returns the
        weights of the learner."""
        self._record = record
        self._lineage = lineage
        self._make_publisher = make_publisher
        self._copy = copy
        self._publisher: Publisher | None = None
        self._running: asyncio.Task[bool] | None = None
        """The newest publication that was begun, until its outcome has been looked at; answered by
        whether it was announced."""

    def prepare(self, floor: int) -> None:
        """Continue above `floor`, unless versions have been counted already."""
        if self._publisher is None:
            self._publisher = self._make_publisher(floor)

    async def publish(self, step: int, *, checkpoint: Path | None = None) -> None:
        """Publish the weights in memory, or the kept model of `checkpoint`, and wait for it.

        Raises `Unavailable` without leadership and when etcd does not answer, `Superseded`.
        """
        await self.settle()
        snapshot = await self._snapshot(TakeSnapshot(step=step, checkpoint=checkpoint))
        self._record.weight_version = await self._own.publish(snapshot)

    async def begin(self, step: int) -> None:
        """Copy the weights and publish them beside the next step; an outage of etcd only delays
        publication. Raises `Superseded`, the earlier publication's, too."""
        await self.settle()
        try:
            snapshot = await self._snapshot(TakeSnapshot(step=step))
        except Unavailable as error:
            log.warning("publication_waits", step=step, error=str(error))
            return
        # Its tokens cannot arrive before the announcement; staleness is counted from it at once.
        self._record.weight_version = self._own.next_version
        self._running = asyncio.create_task(self._announced(snapshot), name="publication")

    async def settle(self) -> None:
        """Wait for the publication in progress. Raises its error, unless etcd did not answer."""
        if self._running is not None:
            await asyncio.wait([self._running])
            self.check()

    def check(self) -> None:
        """Raise the error of a publication that has failed; `Unavailable` is none."""
        if self._running is not None and self._running.done():
            ended, self._running = self._running, None
            ended.result()

    def when_ended(self, observe: Callable[[bool], None]) -> None:
        """Call `observe` once the newest publication has ended: whether it was announced."""
        if self._running is None:
            observe(False)
            return
        self._running.add_done_callback(
            lambda task: observe(
                not task.cancelled() and task.exception() is None and task.result()
            )
        )

    async def stop(self) -> None:
        """Leave the publication in progress: its outcome is unknown."""
        await cancel_and_wait(self._running)

    @property
    def _own(self) -> Publisher:
        assert self._publisher is not None, "resume comes first"
        return self._publisher

    async def _snapshot(self, take: TakeSnapshot) -> Snapshot:
        self._lineage.require_leadership()
        return await self._copy(take)

    async def _announced(self, snapshot: Snapshot) -> bool:
        began_s = time.monotonic()
        try:
            self._record.weight_version = await self._own.publish(snapshot)
        except Unavailable as error:
            self._record.weight_version = self._own.version
            log.warning("publication_waits", step=snapshot.step, error=str(error))
            return False
        metrics.ANNOUNCE_S.set(time.monotonic() - began_s)
        return True
