"""The server's half of a kept stream: many calls on one RPC.

Owns the calls of a stream: numbers, deadlines, aborts, ends and unsent events. Each call is a task.
One write sends the events of all calls that wait at that moment. Not here: what a call does, and
how a caller that does not read it is held back (a subclass); the client's half (`kept_stream`).

The requests of such an RPC have `begin` (call, timeout_s and the call's request) and `cancel`, its
responses `events` (call, and a response or an `end`).
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any, ClassVar, NamedTuple

import grpc
import grpc.aio

from forge.core.errors import DeadlineExceeded, InvalidArgument, Unavailable
from forge.runtime.concurrency.tasks import cancel_and_wait
from forge.runtime.rpc.status import from_rpc_error, to_status, trailing_metadata
from forge.v1 import inference_pb2 as pb

WINDOW_BYTES = 8 << 20
"""Most unsent bytes; beyond it all calls of the stream wait for the reader, and none begins."""
MESSAGE_BYTES = 1 << 20
"""Most bytes of a message with several events."""


class _Event(NamedTuple):
    call: int
    field: str
    body: Any
    size: int
    """Bytes of `body`."""


class ServedStreams:
    """All streams of one method in this process."""

    def __init__(self, open_stream: Callable[[], ServedStream]) -> None:
        self._open_stream = open_stream
        self._open: set[ServedStream] = set()
        self._draining = False

    async def serve(self, requests: AsyncIterator[Any]) -> AsyncGenerator[Any, None]:
        """Yield the responses of one stream. Raises InvalidArgument for a repeated call number."""
        stream = self._open_stream()
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


class ServedStream(ABC):
    """The state of one RPC."""

    message_type: ClassVar[type[Any]]
    """Type of the responses."""
    served_by: ClassVar[str]
    """The process in the texts of errors, e.g. "router"."""

    def __init__(self) -> None:
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._waiting: deque[_Event] = deque()
        self._unsent_bytes = 0
        """Bytes of waiting events, and what a subclass holds."""
        self._more = asyncio.Event()
        """Set when an event waits, and at the end of the requests."""
        self._room = asyncio.Event()
        self._room.set()
        self._last_call = 0
        self._taking = True
        """Whether new calls are taken."""

    @abstractmethod
    def answer(self, begin: Any) -> AsyncGenerator[Any, None]:
        """Yield the responses of one call; runs in a task of its own."""

    @abstractmethod
    def on_response(self, begin: Any, response: Any) -> None:
        """Send a response by `put`, now or later."""

    @abstractmethod
    def on_code(self, code: str, error: Exception | None) -> None:
        """Count and log the end of a call."""

    async def has_room(self, call: int) -> None:
        """Wait until a call may make another response."""
        await self._room.wait()

    @abstractmethod
    def on_request(self, request: Any) -> None:
        """Take the fields of a message besides `begin` and `cancel`."""

    @abstractmethod
    def before_end(self, call: int) -> None:
        """Send the held events of a call."""

    @abstractmethod
    def forget(self, call: int) -> None:
        """Drop the held events of a cancelled call."""

    def drain(self) -> None:
        """See `ServedStreams.drain`."""
        self._taking = False
        self._more.set()

    async def responses(self, requests: AsyncIterator[Any]) -> AsyncGenerator[Any, None]:
        """See `ServedStreams.serve`."""
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
            calls, self._calls = self._calls, {}
            for call in calls:
                self._abandon(call)
            await cancel_and_wait(intake, *calls.values())
            self.on_end_of_stream()

    @abstractmethod
    def on_end_of_stream(self) -> None:
        """All calls have ended, and no event can be sent any more."""

    def put(self, call: int, field: str, body: Any) -> int:
        """Send an event with this field; return the bytes of its body."""
        size: int = body.ByteSize()
        self._waiting.append(_Event(call, field, body, size))
        self.count_unsent(size)
        self._more.set()
        return size

    def count_unsent(self, size: int) -> None:
        """Add to the unsent bytes."""
        self._unsent_bytes += size
        if self._unsent_bytes < WINDOW_BYTES:
            self._room.set()
        else:
            self._room.clear()

    def _message(self) -> Any:
        """Return the waiting events, as many as fit into one message."""
        message, size = self.message_type(), 0
        while self._waiting:
            event = self._waiting[0]
            # A single event may be larger.
            if size and size + event.size > MESSAGE_BYTES:
                break
            self._waiting.popleft()
            size += event.size
            message.events.add(call=event.call, **{event.field: event.body})
        self.count_unsent(-size)
        return message

    async def _take_in(self, requests: AsyncIterator[Any]) -> None:
        try:
            async for request in requests:
                for begin in request.begin:
                    self._begin(begin)
                for call in request.cancel:
                    self._cancel(call)
                self.on_request(request)
                # Refusals take memory too.
                await self._room.wait()
        finally:
            self._taking = False
            self._more.set()

    def _begin(self, begin: Any) -> None:
        if begin.call <= self._last_call:
            raise InvalidArgument(
                f"call {begin.call} was begun after call {self._last_call}: numbers must grow"
            )
        self._last_call = begin.call
        if not self._taking:
            refusal = Unavailable(f"this {self.served_by} is draining", retry_after_s=0.0)
            self._end(begin.call, refusal)
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
            self._abandon(call)
            task.add_done_callback(lambda _: self._more.set())

    def _abandon(self, call: int) -> None:
        """Forget a call whose caller has left; it gets no end."""
        self.forget(call)
        self.on_code("CANCELLED", None)

    async def _run(self, begin: Any) -> None:
        try:
            async with asyncio.timeout(begin.timeout_s) as deadline:
                async with aclosing(self.answer(begin)) as responses:
                    async for response in responses:
                        self.on_response(begin, response)
                        await self.has_room(begin.call)
        except TimeoutError as error:
            late = DeadlineExceeded(f"the answer was not complete after {begin.timeout_s:g} s")
            self._end(begin.call, late if deadline.expired() else error)
        except grpc.aio.AioRpcError as error:
            self._end(begin.call, from_rpc_error(error))
        except asyncio.CancelledError:
            # A call that the caller cancelled is not in `_calls`; any other needs an end.
            if begin.call in self._calls:
                self._end(begin.call, Unavailable(f"the {self.served_by} cancelled the call"))
            raise
        except Exception as error:
            self._end(begin.call, error)
        else:
            self._end(begin.call, None)

    def _end(self, call: int, error: Exception | None) -> None:
        self._calls.pop(call, None)
        self.before_end(call)
        end = pb.SampleEnd()
        code = "OK"
        if error is not None:
            status, end.details = to_status(error)
            end.status_code, code = status.value[0], status.name
            end.metadata.update(trailing_metadata(error))
        self.on_code(code, error)
        self.put(call, "end", end)
