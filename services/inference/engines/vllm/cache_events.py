"""vLLM's cache events, as changes by chain hashes.

vLLM publishes batches with consecutive numbers over ZeroMQ, on sockets that only this worker's user
can reach. A lost batch is requested again. If vLLM no longer has it, the content is unknown: the
report begins again, and from then on each request reports the blocks that it reuses, too.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Sequence
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    ZmqEventPublisher,
)
from zmq.utils.monitor import recv_monitor_message

from forge.runtime.concurrency.tasks import cancel_and_wait
from forge.runtime.telemetry import log
from services.inference.engines.cache_reports.block_chains import BlockChains
from services.inference.engines.cache_reports.cache_log import CacheLog
from services.inference.engines.vllm.metrics import CACHE_GAPS

_CONNECT_S = 60.0
_REPLAY_S = 10.0
_NUMBER_BYTES = 8
REPORT_REUSED = {"kv_cache_report_mode": "full"}
"""`SamplingParams.extra_args` of a request that reports the blocks that it reuses."""


class EventSockets:
    """A directory with vLLM's two sockets: removed as soon as both are connected, so that nothing
    of it is left after any end of the worker."""

    def __init__(self) -> None:
        self._directory = tempfile.mkdtemp(prefix="forge-vllm-")
        self.published = f"ipc://{self._directory}/events"
        self.replayed = f"ipc://{self._directory}/replay"

    def config(self) -> KVEventsConfig:
        """Return vLLM's side."""
        return KVEventsConfig(
            enable_kv_cache_events=True,
            publisher="zmq",
            endpoint=self.published,
            replay_endpoint=self.replayed,
        )

    def remove(self) -> None:
        """Remove the directory."""
        shutil.rmtree(self._directory, ignore_errors=True)


class CacheEvents:
    """The blocks that new requests can find, reported to `reports`."""

    def __init__(self, *, block_tokens: int) -> None:
        """`block_tokens`: of the router's blocks."""
        self.reports = CacheLog()
        self.reports_reused = False
        """Whether requests must report the blocks that they reuse, since some are unknown here."""
        self._chains = BlockChains(self.reports, block_tokens=block_tokens)
        self._salt = ""

    def begin(self, salt: str) -> None:
        """Forget all blocks: from now on requests find those with this salt alone."""
        self._salt = salt
        self._chains.clear()

    def lose(self) -> None:
        """Forget all blocks: an event is lost for good."""
        self._chains.clear()
        self.reports_reused = True

    def apply(self, payload: bytes) -> None:
        """Take one batch. Raises msgspec.MsgspecError for another format."""
        for event in msgspec.msgpack.decode(payload, type=KVEventBatch).events:
            # Of several groups of layers one is enough to tell the tokens.
            if getattr(event, "group_idx", None):
                continue
            match event:
                case BlockStored():
                    self._store(event)
                case BlockRemoved():
                    self._chains.remove(event.block_hashes)
                case AllBlocksCleared():
                    self._chains.clear()

    def _store(self, event: Any) -> None:
        parent, keys = event.parent_block_hash, event.extra_keys
        # The first block has the salt; those behind one of another salt have an unknown parent.
        if parent is None and self._salt not in ((keys or [None])[0] or ()):
            return
        size = event.block_size
        starts = range(0, len(event.token_ids), size)
        blocks = [event.token_ids[start : start + size] for start in starts]
        self._chains.store(parent, zip(event.block_hashes, blocks, strict=False))


class CacheFollower:
    """Reads the events of one vLLM, until closed."""

    def __init__(self, sockets: EventSockets, events: CacheEvents) -> None:
        self._context = zmq.asyncio.Context()
        self.events = events
        self._expected = 0
        self._published = self._context.socket(zmq.SUB)
        self._published.subscribe(b"")
        self._replayed = self._context.socket(zmq.DEALER)
        self._sockets = sockets
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Connect to vLLM, which has started. Raises TimeoutError."""
        async with asyncio.timeout(_CONNECT_S):
            await _connect(self._published, self._sockets.published)
            await _connect(self._replayed, self._sockets.replayed)
        self._sockets.remove()
        self._task = asyncio.create_task(self._follow())

    async def close(self) -> None:
        """End."""
        await cancel_and_wait(self._task)
        self._sockets.remove()
        self._context.destroy(linger=0)

    async def _follow(self) -> None:
        while True:
            try:
                await self._take(await self._next())
            except zmq.ZMQError as error:
                log.warning("vllm_cache_events_ended", error=str(error))
                self._lose()
                return
            except Exception as error:
                # Without the follower the router would keep a stale view of this cache.
                log.warning("vllm_cache_event_unreadable", error=f"{type(error).__name__}: {error}")
                self._lose()

    async def _next(self) -> Sequence[bytes]:
        frames: Sequence[bytes] = await self._published.recv_multipart()
        return frames

    async def _take(self, frames: Sequence[bytes]) -> None:
        _, number_bytes, payload = frames
        number = int.from_bytes(number_bytes, "big")
        if number > self._expected:
            await self._ask_again(number)
        if number == self._expected:
            self._expected += 1
            self.events.apply(payload)

    async def _ask_again(self, number: int) -> None:
        """Have vLLM send all batches from the expected one on; after it, `number` is expected or
        known."""
        log.warning("vllm_cache_events_lost", expected=self._expected, received=number)
        try:
            async with asyncio.timeout(_REPLAY_S):
                await self._replay()
        except TimeoutError:
            pass
        if self._expected < number:
            self._expected = number
            self._lose()
        else:
            CACHE_GAPS.labels("replayed").inc()

    async def _replay(self) -> None:
        await self._replayed.send_multipart([b"", self._expected.to_bytes(_NUMBER_BYTES, "big")])
        while True:
            _, _, number_bytes, payload = await self._replayed.recv_multipart()
            if number_bytes == ZmqEventPublisher.END_SEQ:
                return
            # A batch in between may have left vLLM's buffer, or be the late end of another replay.
            if int.from_bytes(number_bytes, "big") == self._expected:
                self._expected += 1
                self.events.apply(payload)

    def _lose(self) -> None:
        CACHE_GAPS.labels("lost").inc()
        self.events.lose()


async def _connect(socket: Any, endpoint: str) -> None:
    """Connect, and wait until the other side has agreed."""
    monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
    try:
        socket.connect(endpoint)
        await recv_monitor_message(monitor)
    finally:
        socket.disable_monitor()
