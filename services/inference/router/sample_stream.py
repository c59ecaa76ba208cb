"""Many Samples on one kept stream: the router's side of SampleStream.

Owns the calls of a stream: deadlines, aborts, ends and unsent events. Each call is a task. One
write sends the events of all calls. The first piece of an answer and its end are sent at once, the
pieces between them joined, `interval_s` after the first of them: a write, a message and an event
for each token would cost the router, the gateway and the agent more than the token. Not here: the
sampling.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field

import grpc.aio

from forge.core.errors import DeadlineExceeded, InvalidArgument, Unavailable
from forge.runtime.concurrency.tasks import cancel_and_wait
from forge.runtime.rpc.status import from_rpc_error, to_status, trailing_metadata
from forge.runtime.rpc.tokens import joined_responses
from forge.runtime.telemetry import bind_context, log
from forge.v1 import inference_pb2 as pb
from services.inference.router.metrics import STREAM_CALLS

WINDOW_BYTES = 8 << 20
"""Most unsent bytes; beyond it all calls of the stream wait for the reader, and none begins."""
MESSAGE_BYTES = 1 << 20
"""Most bytes of a message with several events."""
HELD_BYTES = 16 << 10
"""Held bytes of an answer that are sent before `interval_s` is over."""

Sample = Callable[[pb.SampleRequest], AsyncGenerator[pb.SampleResponse, None]]


class SampleStreams:
    """All SampleStream calls of this process."""

    def __init__(self, sample: Sample, *, interval_s: float) -> None:
        """`interval_s`: longest time that a piece after the first waits for others; 0: none."""
        self._sample = sample
        self._interval_s = interval_s
        self._open: set[_Stream] = set()
        self._draining = False

    async def serve(
        self, requests: AsyncIterator[pb.SampleStreamRequest]
    ) -> AsyncGenerator[pb.SampleStreamResponse, None]:
        """Yield the responses of one stream. Raises InvalidArgument for a repeated call number."""
        stream = _Stream(self._sample, self._interval_s)
        self._open.add(stream)
        if self._draining:
            stream.drain()
        try:
            async with aclosing(stream.responses(requests)) as responses:
                async for response in responses:
                    yield response
        finally:
            self._open.discard(stream)

    def drain(self) -> None:
        """Refuse new calls; each stream ends when its open calls have."""
        self._draining = True
        for stream in self._open:
            stream.drain()


@dataclass(slots=True)
class _Held:
    """Unsent pieces of an answer whose first piece was sent."""

    responses: list[pb.SampleResponse] = field(default_factory=list)
    size: int = 0
    """Bytes of `responses`."""


class _Stream:
    """The state of one call of SampleStream."""

    def __init__(self, sample: Sample, interval_s: float) -> None:
        self._sample = sample
        self._interval_s = interval_s
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._held: dict[int, _Held] = {}
        """By call, from its first piece to its end."""
        self._send_later: asyncio.TimerHandle | None = None
        """Set while a held piece waits for it."""
        self._waiting: deque[tuple[pb.SampleEvent, int]] = deque()
        """Events and their sizes in bytes."""
        self._unsent_bytes = 0
        """Bytes of waiting events and held pieces."""
        self._more = asyncio.Event()
        """Set when an event waits, and at the end of the requests."""
        self._room = asyncio.Event()
        self._room.set()
        self._last_call = 0
        self._taking = True
        """Whether new calls are taken."""

    def drain(self) -> None:
        self._taking = False
        self._more.set()

    async def responses(
        self, requests: AsyncIterator[pb.SampleStreamRequest]
    ) -> AsyncGenerator[pb.SampleStreamResponse, None]:
        intake = asyncio.create_task(self._take_in(requests))
        try:
            while True:
                await self._more.wait()
                self._more.clear()
                if intake.done():
                    intake.result()
                while self._waiting:
                    yield self._message()
                if not self._taking and not self._calls:
                    return
        finally:
            if self._send_later is not None:
                self._send_later.cancel()
            tasks = {intake, *self._calls.values()}
            await cancel_and_wait(*tasks)

    def _message(self) -> pb.SampleStreamResponse:
        """Return the waiting events, as many as fit into one message."""
        message, size = pb.SampleStreamResponse(), 0
        while self._waiting:
            event, event_bytes = self._waiting[0]
            # A single event may be larger.
            if message.events and size + event_bytes > MESSAGE_BYTES:
                break
            self._waiting.popleft()
            size += event_bytes
            message.events.append(event)
        self._count_unsent(-size)
        return message

    async def _take_in(self, requests: AsyncIterator[pb.SampleStreamRequest]) -> None:
        try:
            async for request in requests:
                for begin in request.begin:
                    self._begin(begin)
                for call in request.cancel:
                    self._cancel(call)
                # Refusals take memory too.
                await self._room.wait()
        finally:
            self._taking = False
            self._more.set()

    def _begin(self, begin: pb.SampleBegin) -> None:
        if begin.call <= self._last_call:
            raise InvalidArgument(
                f"call {begin.call} was begun after call {self._last_call}: numbers must grow"
            )
        self._last_call = begin.call
        if not self._taking:
            self._end(begin.call, Unavailable("this router is draining", retry_after_s=0.0))
            return
        if not begin.timeout_s > 0:
            wrong = InvalidArgument(f"timeout_s = {begin.timeout_s}: must be above 0")
            self._end(begin.call, wrong)
            return
        self._calls[begin.call] = asyncio.create_task(self._run(begin))

    def _cancel(self, call: int) -> None:
        task = self._calls.pop(call, None)
        if task is not None:
            task.cancel()
            self._count_unsent(-self._held.pop(call, _Held()).size)
            STREAM_CALLS.labels("CANCELLED").inc()
            task.add_done_callback(lambda _: self._more.set())

    async def _run(self, begin: pb.SampleBegin) -> None:
        bind_context(trajectory_id=begin.request.session_id)
        try:
            async with asyncio.timeout(begin.timeout_s) as deadline:
                await self._answer(begin)
        except TimeoutError as error:
            late = DeadlineExceeded(f"the answer was not complete after {begin.timeout_s:g} s")
            self._end(begin.call, late if deadline.expired() else error)
        except grpc.aio.AioRpcError as error:
            self._end(begin.call, from_rpc_error(error))
        except asyncio.CancelledError:
            # A call that the caller cancelled is not in `_calls`; any other needs an end.
            if begin.call in self._calls:
                self._end(begin.call, Unavailable("the router cancelled the call"))
            raise
        except Exception as error:
            self._end(begin.call, error)
        else:
            self._end(begin.call, None)

    async def _answer(self, begin: pb.SampleBegin) -> None:
        async with aclosing(self._sample(begin.request)) as responses:
            async for response in responses:
                self._add_piece(begin.call, response)
                await self._room.wait()

    def _add_piece(self, call: int, response: pb.SampleResponse) -> None:
        """Sends the first piece; holds a later one until others, the end or the timer follow."""
        held = self._held.get(call)
        if held is None:
            self._held[call] = _Held()
            self._put(pb.SampleEvent(call=call, response=response))
            return
        size = response.ByteSize()
        held.responses.append(response)
        held.size += size
        self._count_unsent(size)
        if response.finish_reason or not self._interval_s or held.size >= HELD_BYTES:
            self._send_held(call)
        elif self._send_later is None:
            loop = asyncio.get_running_loop()
            self._send_later = loop.call_later(self._interval_s, self._send_all_held)

    def _send_all_held(self) -> None:
        self._send_later = None
        for call in self._held:
            self._send_held(call)

    def _send_held(self, call: int) -> None:
        held = self._held[call]
        if held.responses:
            self._held[call] = _Held()
            self._count_unsent(-held.size)
            self._put(pb.SampleEvent(call=call, response=joined_responses(held.responses)))

    def _end(self, call: int, error: Exception | None) -> None:
        self._calls.pop(call, None)
        if call in self._held:
            self._send_held(call)
            del self._held[call]
        end = pb.SampleEnd()
        if error is not None:
            code, end.details = to_status(error)
            end.status_code = code.value[0]
            end.metadata.update(trailing_metadata(error))
            if code is grpc.StatusCode.INTERNAL:
                log.error("sample_failed", exc_info=error)
        STREAM_CALLS.labels("OK" if error is None else code.name).inc()
        self._put(pb.SampleEvent(call=call, end=end))

    def _put(self, event: pb.SampleEvent) -> None:
        event_bytes = event.ByteSize()
        self._waiting.append((event, event_bytes))
        self._count_unsent(event_bytes)
        self._more.set()

    def _count_unsent(self, size: int) -> None:
        self._unsent_bytes += size
        if self._unsent_bytes < WINDOW_BYTES:
            self._room.set()
        else:
            self._room.clear()
