"""Many Samples on one kept stream: the router's side of SampleStream.

Owns the calls of a stream: deadlines, aborts, ends and unsent events. Each call is a task. One
write sends the events of all calls, so a loaded stream does not write once per token. Not here:
the sampling.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing

import grpc.aio

from forge.core.errors import DeadlineExceeded, InvalidArgument, Unavailable
from forge.runtime.rpc.status import from_rpc_error, to_status, trailing_metadata
from forge.runtime.telemetry import bind_context, log
from forge.v1 import inference_pb2 as pb
from services.inference.router.metrics import STREAM_CALLS

WINDOW_BYTES = 8 << 20
"""Most unsent bytes; beyond it all calls of the stream wait for the reader, and none begins."""
MESSAGE_BYTES = 1 << 20
"""Most bytes of a message with several events."""

Sample = Callable[[pb.SampleRequest], AsyncGenerator[pb.SampleResponse, None]]


class SampleStreams:
    """All SampleStream calls of this process."""

    def __init__(self, sample: Sample) -> None:
        self._sample = sample
        self._open: set[_Stream] = set()
        self._draining = False

    async def serve(
        self, requests: AsyncIterator[pb.SampleStreamRequest]
    ) -> AsyncGenerator[pb.SampleStreamResponse, None]:
        """Yield the responses of one stream. Raises InvalidArgument for a repeated call number."""
        stream = _Stream(self._sample)
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


class _Stream:
    """The state of one call of SampleStream."""

    def __init__(self, sample: Sample) -> None:
        self._sample = sample
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._waiting: deque[tuple[pb.SampleEvent, int]] = deque()
        """Events and their sizes in bytes."""
        self._waiting_bytes = 0
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
            tasks = {intake, *self._calls.values()}
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

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
        self._waiting_bytes -= size
        if self._waiting_bytes < WINDOW_BYTES:
            self._room.set()
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
                self._put(pb.SampleEvent(call=begin.call, response=response))
                await self._room.wait()

    def _end(self, call: int, error: Exception | None) -> None:
        self._calls.pop(call, None)
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
        self._waiting_bytes += event_bytes
        if self._waiting_bytes >= WINDOW_BYTES:
            self._room.clear()
        self._more.set()
