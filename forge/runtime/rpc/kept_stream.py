"""The client's half of a kept stream: many calls on one RPC.

Owns the RPC, its open calls and its loss. Owns no retry and no responses: each goes to the receiver
of its call at once, so a caller that does not read never delays the others. The server's half is
`served_stream`, which has the form of the messages.
"""

from __future__ import annotations

import asyncio
import contextvars
import math
from abc import ABC, abstractmethod
from typing import Any, ClassVar, NamedTuple, Protocol

import grpc
import grpc.aio

from forge.core.errors import ForgeError, InvalidArgument, Unavailable
from forge.runtime.concurrency.tasks import cancel_and_wait
from forge.runtime.rpc.channel import MAX_MESSAGE_BYTES
from forge.runtime.rpc.status import from_rpc_error, from_status
from forge.runtime.telemetry import log

MESSAGE_BYTES = 1 << 20
"""Size limit of a message with several requests."""
MESSAGE_OVERHEAD_BYTES = 1 << 10
"""Size of a message beyond the single request in it."""
_STATUS = {code.value[0]: code for code in grpc.StatusCode}


class CallReceiver(Protocol):
    """Receives the responses to one request."""

    def on_response(self, response: Any) -> None:
        """Receives one response."""

    def on_end(self, error: ForgeError | None) -> None:
        """Receives the end; None for success."""


class _EndedByPeer(Unavailable):
    """The server ended the stream: after a drain, once its calls had ended."""


class _UnsentRequest(NamedTuple):
    request: Any
    size: int
    """Bytes of the request."""
    fields: dict[str, Any]
    """Fields of `begin` besides call and request."""


class KeptStream(ABC):
    """One RPC and its open requests."""

    message_type: ClassVar[type[Any]]
    """Type of the requests."""
    lost_event: ClassVar[str]
    """In the log, when the stream is lost."""
    own_process: ClassVar[str]
    """The process of this half, in the texts of errors."""

    def __init__(self, call: Any, *, peer: str) -> None:
        """`peer`: instance id of the server."""
        self.peer = peer
        self._call = call
        self._receivers: dict[int, CallReceiver] = {}
        self._unsent: dict[int, _UnsentRequest] = {}
        """By request number, oldest first."""
        self._cancels: list[int] = []
        """Sent requests that the server has to cancel."""
        self._has_unsent = asyncio.Event()
        self._last_number = 0
        self.lost_s = -math.inf
        """Time of the loss, by the clock of the event loop."""
        # An empty context: the stream must not log as the session of its first request.
        loop = asyncio.get_running_loop()
        self._task = loop.create_task(self._run(), context=contextvars.Context())

    @abstractmethod
    def lost_error(self, words: str) -> ForgeError:
        """Return the error of a request on a lost stream."""

    @property
    def lost(self) -> bool:
        """True after the loss of the stream."""
        return self.lost_s > -math.inf

    def send_request(
        self, request: Any, receiver: CallReceiver, *, timeout_s: float, **fields: Any
    ) -> int:
        """Queues a request and returns its number on this stream; `fields` are those of `begin`
        beside call, request and timeout_s. Raises `InvalidArgument` for a request larger than a
        message, `lost_error` if the stream was lost."""
        size = request.ByteSize()
        if size > MAX_MESSAGE_BYTES - MESSAGE_OVERHEAD_BYTES:
            raise InvalidArgument(
                f"the request has {size} bytes, more than the "
                f"{MAX_MESSAGE_BYTES - MESSAGE_OVERHEAD_BYTES} that a message to {self.peer} holds"
            )
        if self.lost:
            raise self.lost_error(f"the stream to {self.peer} was lost")
        self._last_number += 1
        number = self._last_number
        self._receivers[number] = receiver
        self._unsent[number] = _UnsentRequest(request, size, {"timeout_s": timeout_s, **fields})
        self._has_unsent.set()
        return number

    def cancel_request(self, number: int) -> None:
        """Ends a request without a call of its receiver. The server gets a cancel if it has the
        request."""
        if self._receivers.pop(number, None) is None:
            return
        if self._unsent.pop(number, None) is None:
            self._cancels.append(number)
            self._has_unsent.set()

    async def close_stream(self) -> None:
        """Ends the RPC, and the open requests with `lost_error`."""
        await cancel_and_wait(self._task)
        # A task that is cancelled before its first step never runs its `finally`.
        self._end_requests("was closed")

    def add_request(self, begin: Any, request: Any) -> None:
        """Put a request into the entry of its begin. In place: prompts are large, and adding a
        complete entry copies it twice."""
        begin.request.CopyFrom(request)

    def response_in(self, event: Any) -> Any:
        """Return the response of an event that is no end."""
        return event.response

    def has_more(self) -> bool:
        """Whether a message is to be sent."""
        return bool(self._unsent or self._cancels)

    def wake(self) -> None:
        """Send a message soon, since `has_more` may have changed."""
        self._has_unsent.set()

    async def _run(self) -> None:
        cause = "was closed"
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._write())
                tasks.create_task(self._read())
        except* Exception as group:
            cause = f"was lost: {self._log_loss(group)}"
        finally:
            self._end_requests(cause)

    def _end_requests(self, cause: str) -> None:
        self.lost_s = asyncio.get_running_loop().time()
        self._call.cancel()
        self._unsent.clear()
        receivers, self._receivers = self._receivers, {}
        for receiver in receivers.values():
            # A new error each: a shared one would keep the frames of all its readers. Its class is
            # not the stream's: the reason may be of no concern to this request.
            receiver.on_end(self.lost_error(f"the stream to {self.peer} {cause}"))

    def _log_loss(self, group: ExceptionGroup) -> str:
        """Logs why the stream ended; returns the part of it that callers may see."""
        first = group.exceptions[0]
        error = from_rpc_error(first) if isinstance(first, grpc.aio.AioRpcError) else first
        bug = None if isinstance(error, ForgeError) else error
        if isinstance(error, _EndedByPeer) and not self._receivers:
            return str(error)  # A planned stop: nothing moves.
        (log.info if bug is None else log.error)(
            self.lost_event,
            peer=self.peer,
            calls=len(self._receivers),
            error=str(error),
            exc_info=bug,
        )
        if bug is None:
            return str(error)
        return f"internal error; the {self.own_process}'s log has the cause"

    async def _write(self) -> None:
        while True:
            await self._has_unsent.wait()
            self._has_unsent.clear()
            while self.has_more():
                message = self.next_message()
                try:
                    await self._call.write(message)
                except (asyncio.InvalidStateError, grpc.aio.AioRpcError):
                    return  # The RPC has ended; `_read` gets the reason.

    def next_message(self) -> Any:
        """Takes all cancels, and unsent requests up to the size limit."""
        message = self.message_type(cancel=self._cancels)
        self._cancels = []
        size = 0
        for number, unsent in self._unsent.items():
            size += unsent.size
            # A single request may exceed the limit; several may not.
            if size > MESSAGE_BYTES and (message.begin or message.cancel):
                break
            self.add_request(message.begin.add(call=number, **unsent.fields), unsent.request)
        for begin in message.begin:
            del self._unsent[begin.call]
        return message

    async def _read(self) -> None:
        while True:
            message = await self._call.read()
            if message is grpc.aio.EOF:
                raise _EndedByPeer(f"{self.peer} ended the stream")
            for event in message.events:
                receiver = self._receivers.get(event.call)
                if receiver is None:
                    continue  # Cancelled.
                if event.HasField("end"):
                    del self._receivers[event.call]
                    receiver.on_end(_error_of(event.end))
                else:
                    receiver.on_response(self.response_in(event))


def _error_of(end: Any) -> ForgeError | None:
    if not end.status_code:
        return None
    code = _STATUS.get(end.status_code, grpc.StatusCode.UNKNOWN)
    return from_status(code, end.details, end.metadata)
