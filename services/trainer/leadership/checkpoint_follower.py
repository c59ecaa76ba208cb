"""A standby's copy of the leader's checkpoints, for hosts without a shared directory.

Owns when to fetch, and from whom. A standby that has the newest checkpoint when it is elected
continues from it. In a shared directory the checkpoint is there already.
"""

from __future__ import annotations

import asyncio
from collections import Counter
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
from services.trainer.checkpoint.retention import CheckpointRetention
from services.trainer.checkpoint.transfer import Staging, is_current, pieces
from services.trainer.leadership.lineage import RECORD_KEY, LineageRecord

SILENCE_S = 30.0


class CheckpointFollower:
    """Fetches each checkpoint of the leader into this trainer's directory."""

    def __init__(
        self, context: ServiceContext, directory: Path, retention: CheckpointRetention
    ) -> None:
        self._context = context
        self._directory = directory
        self._retention = retention
        self._trainers = context.coordinator.discover("trainer")
        self._address = ""
        """Address of the leader; kept while it drains, when discovery no longer has it."""
        self._wanted: LineageRecord | None = None
        self._news = asyncio.Event()
        self._arriving = asyncio.Lock()

    async def follow(self) -> None:
        """Follow until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._listen())
            tasks.create_task(self._keep_up())

    async def arrived(self) -> None:
        """Returns once no checkpoint is in the middle of its arrival."""
        async with self._arriving:
            pass

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
                    async with self._arriving:
                        stored = await self._obtain(record)
                    if stored:
                        await self._confirm(record)
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

    async def _obtain(self, record: LineageRecord) -> bool:
        """Whether the checkpoint is here now; False if a newer one has replaced it."""
        here = partial(
            is_current,
            self._directory,
            step=record.step,
            lineage=record.lineage,
            fingerprint=record.fingerprint,
        )
        if await asyncio.to_thread(here):
            return True
        staging = Staging(
            self._directory,
            step=record.step,
            fingerprint=record.fingerprint,
            retention=self._retention,
        )
        have = await asyncio.to_thread(staging.begin)
        try:
            async with aclosing(self._fetch(step=record.step, have=have)) as responses:
                async for response in responses:
                    await asyncio.to_thread(staging.add, response)
        except NotFound:
            if self._wanted is record:
                raise
            return False
        path = await asyncio.to_thread(staging.complete)
        log.info("checkpoint_fetched", step=record.step, path=str(path), source=self._address)
        return True

    async def _confirm(self, record: LineageRecord) -> None:
        async with aclosing(self._fetch(step=record.step, stored=True)) as responses:
            # A leader of an earlier release sends the checkpoint again.
            async for _ in responses:
                return

    async def _fetch(self, **fields: Any) -> AsyncGenerator[pb.FetchCheckpointResponse, None]:
        request = pb.FetchCheckpointRequest(trainer=self._context.metadata["incarnation"], **fields)
        stub = self._context.channels.stub(rpc.TrainerServiceStub, self._source())
        call: Any = stub.FetchCheckpoint(request)
        try:
            async for response in flowing(call, silence_s=SILENCE_S, source="the trainer"):
                yield response
        finally:
            call.cancel()

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
        self._stored: dict[str, int] = {}
        """By standby, the step of the newest checkpoint that it has stored; 0 before the first."""
        self._changed = asyncio.Event()
        self._sending: Counter[int] = Counter()

    def sending(self) -> frozenset[int]:
        """Steps of the checkpoints that standbys are fetching now; any thread may call it."""
        return frozenset(self._sending)

    async def send(
        self, request: pb.FetchCheckpointRequest
    ) -> AsyncGenerator[pb.FetchCheckpointResponse, None]:
        """Yield the responses to one call. Raises `NotFound` and `DataLoss`."""
        if request.stored:
            self._stored[request.trainer] = request.step
            self._changed.set()
            return
        self._stored.setdefault(request.trainer, 0)
        responses = pieces(self._directory, request)
        self._sending[request.step] += 1
        try:
            while (response := await asyncio.to_thread(next, responses, None)) is not None:
                yield response
        finally:
            self._sending[request.step] -= 1
            self._sending += Counter()  # without those at zero
            await asyncio.to_thread(responses.close)

    async def handed_over(self, step: int, *, standbys: int) -> None:
        """Wait until the standbys that have ever asked here have stored the checkpoint of `step`.
        `standbys` counts those that live."""
        while True:
            self._changed.clear()
            stored = sum(newest >= step for newest in self._stored.values())
            if stored >= min(standbys, len(self._stored)):
                return
            await self._changed.wait()
