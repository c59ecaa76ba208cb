"""A standby's copy of the leader's checkpoints, for hosts without a shared directory.

Owns when to fetch, and from whom. A standby that has the newest checkpoint when it is elected
continues from it. In a shared directory the checkpoint is there already.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any

from forge.core.errors import DataLoss, ForgeError, NotFound, Unavailable
from forge.runtime.concurrency.backoff import Backoff
from forge.runtime.process.service import ServiceContext
from forge.runtime.rpc.streams import flowing
from forge.runtime.telemetry import log
from forge.v1 import trainer_pb2 as pb
from forge.v1 import trainer_pb2_grpc as rpc
from services.trainer.checkpoint.transfer import Staging, is_current, pieces
from services.trainer.lineage import RECORD_KEY, LineageRecord

SILENCE_S = 30.0


class CheckpointFollower:
    """Fetches each checkpoint of the leader into this trainer's directory."""

    def __init__(self, context: ServiceContext, directory: Path) -> None:
        self._context = context
        self._directory = directory
        self._trainers = context.coordinator.discover("trainer")
        self._address = ""
        """Of the leader; kept while it drains, when discovery no longer has it."""
        self._wanted: LineageRecord | None = None
        self._news = asyncio.Event()

    async def follow(self) -> None:
        """Follow until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._listen())
            tasks.create_task(self._keep_up())

    async def _listen(self) -> None:
        await self._trainers.known()
        async with aclosing(self._context.coordinator.follow(RECORD_KEY)) as records:
            async for value in records:
                try:
                    self._wanted = None if value is None else LineageRecord.decode(value.value)
                except DataLoss as error:
                    log.error("lineage_unreadable", error=str(error))
                self._news.set()

    async def _keep_up(self) -> None:
        backoff = Backoff(0.5, 30.0)
        while True:
            self._news.clear()
            record = self._wanted
            try:
                if record is not None and record.step:
                    await self._obtain(record)
                backoff.reset()
                await self._news.wait()
            except ForgeError as error:
                pause_s = backoff.next_s()
                log.warning(
                    "checkpoint_not_fetched",
                    step=record.step if record else 0,
                    retry_in_s=pause_s,
                    error=str(error),
                )
                try:
                    async with asyncio.timeout(pause_s):
                        await self._news.wait()
                except TimeoutError:
                    continue

    async def _obtain(self, record: LineageRecord) -> None:
        here = partial(
            is_current,
            self._directory,
            step=record.step,
            lineage=record.lineage,
            fingerprint=record.fingerprint,
        )
        if await asyncio.to_thread(here):
            return
        staging = Staging(self._directory, step=record.step, fingerprint=record.fingerprint)
        have = await asyncio.to_thread(staging.begin)
        request = pb.FetchCheckpointRequest(
            step=record.step, have=have, trainer=self._context.metadata["incarnation"]
        )
        stub = rpc.TrainerServiceStub(self._context.channels.get(self._source()))
        call: Any = stub.FetchCheckpoint(request)
        try:
            async for response in flowing(call, silence_s=SILENCE_S, source="the trainer"):
                await asyncio.to_thread(staging.add, response)
        except NotFound:
            if self._wanted is record:
                raise
            return
        finally:
            call.cancel()
        path = await asyncio.to_thread(staging.complete)
        log.info("checkpoint_fetched", step=record.step, path=str(path), source=self._address)

    def _source(self) -> str:
        for instance in self._trainers.instances:
            self._address = instance.address
        if not self._address:
            raise Unavailable("no trainer is in discovery that could send its checkpoint")
        return self._address


class CheckpointSource:
    """The leader's end: sends checkpoints, and knows which standbys have the newest."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._sent: dict[str, int] = {}
        """By standby, the step that it has fetched last; 0 during its first."""
        self._changed = asyncio.Event()

    async def send(
        self, request: pb.FetchCheckpointRequest
    ) -> AsyncGenerator[pb.FetchCheckpointResponse, None]:
        """The responses to one call. Raises `NotFound` and `DataLoss`."""
        self._sent.setdefault(request.trainer, 0)
        responses = pieces(self._directory, request)
        try:
            while (response := await asyncio.to_thread(next, responses, None)) is not None:
                yield response
        finally:
            await asyncio.to_thread(responses.close)
        self._sent[request.trainer] = request.step
        self._changed.set()

    async def handed_over(self, step: int, *, standbys: int) -> None:
        """Wait until the standbys that fetch have the checkpoint of `step`. `standbys` counts all,
        also those of a shared directory."""
        while True:
            self._changed.clear()
            fetched = sum(sent >= step for sent in self._sent.values())
            if fetched >= min(standbys, len(self._sent)):
                return
            await self._changed.wait()
