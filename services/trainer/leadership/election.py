"""One trainer's way to the leadership and out of it.

Owns the order: a candidate fetches the leader's checkpoints until it is elected, then the copies
that its host lacks; a leader that drains waits until its standbys have the last checkpoint.
"""

from __future__ import annotations

import asyncio
import socket
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

from forge.core.errors import Unavailable
from forge.runtime.concurrency.tasks import cancel_and_wait
from forge.runtime.process.service import ServiceContext
from forge.runtime.settings.agreed import agreed_model
from forge.runtime.telemetry import log
from forge.runtime.weights import TRAINER_STANDBYS
from services.trainer.checkpoint.remote_copies import RemoteCopies, newest_step
from services.trainer.checkpoint.retention import CheckpointRetention
from services.trainer.checkpoint.store import CheckpointStore
from services.trainer.config import TrainerConfig
from services.trainer.leadership.checkpoint_follower import CheckpointFollower, CheckpointSource
from services.trainer.leadership.lineage import Lineage


class TrainerElection:
    """Stands for election once; afterwards this process leads until it stops."""

    def __init__(self, context: ServiceContext, config: TrainerConfig) -> None:
        self._context = context
        self._kept = config.checkpoint
        self._directory = Path(config.checkpoint.dir)
        self._retention = CheckpointRetention(
            last=config.checkpoint.keep_last, every_steps=config.checkpoint.keep_every_steps
        )
        self.checkpoints_sent = CheckpointSource(self._directory)
        """Gives the checkpoints of this trainer to standbys."""
        self.lineage = Lineage(
            context.coordinator,
            trainer=f"{config.instance_id} {context.metadata['incarnation']}",
            location=f"{socket.gethostname()}:{self._directory.resolve()}",
            start_over=config.start_over,
            ttl_s=config.lease_ttl_s,
            model=agreed_model(config.model_path),
        )
        self._superseded = False
        self._following: asyncio.Task[None] | None = None

    async def won(self) -> tuple[CheckpointStore, RemoteCopies | None]:
        """Waits until this trainer leads; before, it opens no checkpoint and loads no model.

        Returns its checkpoints, which continue the lineage, and the copies of them.
        Raises `ConfigError` for checkpoints of another lineage and for an invalid
        `checkpoint.copy_to`, `Unavailable` if that place does not answer.
        """
        await self._campaign()
        copies = await self._fetched_copies()
        store = CheckpointStore(self._directory, self._retention)
        await self.lineage.check(store)
        return store, copies

    def watch(self) -> None:
        """From here on, ends the process, without a checkpoint, once another trainer leads."""
        self._following = asyncio.create_task(self._until_superseded(), name="leadership")

    @property
    def superseded(self) -> bool:
        """Whether another trainer leads now."""
        return self._superseded

    async def hand_over(self, step: int, *, give_up_s: float) -> None:
        """Waits until standbys on other hosts have the checkpoint of `step`.

        `give_up_s` is a time of the monotonic clock.
        """
        with suppress(TimeoutError, Unavailable):
            async with asyncio.timeout(max(0.0, give_up_s - time.monotonic())):
                standbys = len(await self._context.coordinator.values(TRAINER_STANDBYS))
                await self.checkpoints_sent.handed_over(step, standbys=standbys)

    async def resign(self) -> None:
        """Gives the leadership up, if this process has it."""
        await cancel_and_wait(self._following)
        await self.lineage.resign()

    async def _campaign(self) -> None:
        """Until elected, fetches the checkpoints of the leader."""
        context = self._context

        def ended(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                context.fail("checkpoint-follower", error)

        follower = CheckpointFollower(context, self._directory, self._retention)
        following = asyncio.create_task(follower.follow())
        following.add_done_callback(ended)
        try:
            await self.lineage.campaign(context.stand_by)
            await follower.arrived()
        finally:
            await cancel_and_wait(following)

    async def _fetched_copies(self) -> RemoteCopies | None:
        """The copies at `checkpoint.copy_to`; fetches the newest one if this host lacks it."""
        if not self._kept.copy_to:
            return None
        copies = RemoteCopies(self._kept.copy_to, self._retention)
        here = newest_step(self._directory)
        lacking = await self.lineage.lacks(here)
        if lacking is not None:
            fetch = partial(copies.fetch_newer, self._directory, lineage=lacking, after=here)
            if step := await asyncio.to_thread(fetch):
                log.info("checkpoint_fetched", step=step, source=self._kept.copy_to)
        return copies

    async def _until_superseded(self) -> None:
        await self.lineage.superseded()
        self._superseded = True
        log.error("superseded", error="another trainer leads: one policy has one trainer")
        self._context.stop()
