"""Kept streams to the inference routers: one SampleStream RPC per router, for many answers.

Owns the streams, their open requests and the loss of a stream. Owns no retry and no responses: each
goes to its `ResponseReceiver` at once, so a slow agent never delays the other answers.
"""

from __future__ import annotations

import asyncio
import contextvars
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import grpc
import grpc.aio

from forge.core.errors import ForgeError, InvalidArgument, Unavailable
from forge.runtime.concurrency.tasks import cancel_and_wait
from forge.runtime.rpc.channel import MAX_MESSAGE_BYTES
from forge.runtime.rpc.remote import Remote
from forge.runtime.rpc.status import from_rpc_error, from_status
from forge.runtime.telemetry import log
from forge.v1 import inference_pb2 as pb
from services.gateway.errors import RouterLost

if TYPE_CHECKING:
    from forge.runtime.coordination import Instance
    from forge.v1.inference_pb2_grpc import InferenceServiceAsyncStub

MESSAGE_BYTES = 1 << 20
"""Size limit of a message with several requests."""
MESSAGE_OVERHEAD_BYTES = 1 << 10
"""Size of a message beyond the single request in it."""
AVOID_LOST_S = 2.0
"""Time for which a router with a lost stream is avoided, if there is another router."""
_STATUS = {code.value[0]: code for code in grpc.StatusCode}


class ResponseReceiver(Protocol):
    """Receives the responses to one request."""

    def on_response(self, response: pb.SampleResponse) -> None:
        """Receives one response."""

    def on_end(self, error: ForgeError | None) -> None:
        """Receives the end; None for success."""


class _UnsentRequest(NamedTuple):
    request: pb.SampleRequest
    size: int
    """Bytes of the request."""
    timeout_s: float


class RouterStreams:
    """One stream per router; a lost stream is replaced."""

    def __init__(self, remote: Remote[InferenceServiceAsyncStub]) -> None:
        self._remote = remote
        self._streams: dict[str, RouterStream] = {}
        """By address."""

    async def pick_stream(self, *, timeout_s: float) -> RouterStream:
        """Returns the stream to a router; waits for a router to appear. Raises `Unavailable`."""
        instance, stub = await self._remote.pick(where=self._not_avoided(), timeout_s=timeout_s)
        stream = self._streams.get(instance.address)
        if stream is None or stream.lost:
            avoided = self._avoided()
            self._streams = {
                address: kept
                for address, kept in self._streams.items()
                if not kept.lost or address in avoided
            }
            stream = self._streams[instance.address] = RouterStream(
                stub.SampleStream(), router=instance.instance_id
            )
        return stream

    def _not_avoided(self) -> Callable[[Instance], bool] | None:
        """Returns the filter for routers: discovery shows a dead router until its lease expires."""
        avoided = self._avoided()
        instances = self._remote.instances()
        if not avoided or all(instance.address in avoided for instance in instances):
            return None
        return lambda instance: instance.address not in avoided

    def _avoided(self) -> set[str]:
        oldest_s = asyncio.get_running_loop().time() - AVOID_LOST_S
        return {address for address, stream in self._streams.items() if stream.lost_s > oldest_s}

    async def close_streams(self) -> None:
        """Ends every stream, and its requests with `RouterLost`."""
        streams, self._streams = list(self._streams.values()), {}
        for stream in streams:
            await stream.close_stream()


class RouterStream:
    """One SampleStream RPC and its open requests."""

    def __init__(self, call: Any, *, router: str) -> None:
        self._call = call
        self._router = router
        self._receivers: dict[int, ResponseReceiver] = {}
        self._unsent: dict[int, _UnsentRequest] = {}
        """By request number, oldest first."""
        self._cancels: list[int] = []
        """Sent requests that the router has to cancel."""
        self._has_unsent = asyncio.Event()
        self._last_number = 0
        self.lost_s = -math.inf
        """Time of the loss, by the clock of the event loop."""
        # An empty context: the stream must not log as the session of its first request.
        loop = asyncio.get_running_loop()
        self._task = loop.create_task(self._run(), context=contextvars.Context())

    @property
    def lost(self) -> bool:
        """True after the loss of the stream."""
        return self.lost_s > -math.inf

    def send_request(
        self, request: pb.SampleRequest, receiver: ResponseReceiver, *, timeout_s: float
    ) -> int:
        """Queues a request and returns its number on this stream. Raises `InvalidArgument` for a
        request larger than a message, `RouterLost` if the stream was lost."""
        size = request.ByteSize()
        if size > MAX_MESSAGE_BYTES - MESSAGE_OVERHEAD_BYTES:
            raise InvalidArgument(
                f"the request has {size} bytes, more than the "
                f"{MAX_MESSAGE_BYTES - MESSAGE_OVERHEAD_BYTES} that a message to a router holds"
            )
        if self.lost:
            raise RouterLost(f"the stream to {self._router} was lost")
        self._last_number += 1
        number = self._last_number
        self._receivers[number] = receiver
        self._unsent[number] = _UnsentRequest(request, size, timeout_s)
        self._has_unsent.set()
        return number

    def cancel_request(self, number: int) -> None:
        """Ends a request without a call of its receiver. The router gets a cancel if it has the
        request."""
        if self._receivers.pop(number, None) is None:
            return
        if self._unsent.pop(number, None) is None:
            self._cancels.append(number)
            self._has_unsent.set()

    async def close_stream(self) -> None:
        """Ends the RPC, and the open requests with `RouterLost`."""
        await cancel_and_wait(self._task)
        # A task that is cancelled before its first step never runs its `finally`.
        self._end_requests("was closed")

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
            receiver.on_end(RouterLost(f"the stream to {self._router} {cause}"))

    def _log_loss(self, group: ExceptionGroup) -> str:
        """Logs why the stream ended; returns the part of it that agents may see."""
        first = group.exceptions[0]
        error = from_rpc_error(first) if isinstance(first, grpc.aio.AioRpcError) else first
        bug = None if isinstance(error, ForgeError) else error
        (log.info if bug is None else log.error)(
            "router_stream_lost",
            router=self._router,
            calls=len(self._receivers),
            error=str(error),
            exc_info=bug,
        )
        return str(error) if bug is None else "internal error; the gateway's log has the cause"

    async def _write(self) -> None:
        while True:
            await self._has_unsent.wait()
            self._has_unsent.clear()
            while self._unsent or self._cancels:
                message = self._next_message()
                try:
                    await self._call.write(message)
                except (asyncio.InvalidStateError, grpc.aio.AioRpcError):
                    return  # The RPC has ended; `_read` gets the reason.

    def _next_message(self) -> pb.SampleStreamRequest:
        """Takes all cancels, and unsent requests up to the size limit."""
        message = pb.SampleStreamRequest(cancel=self._cancels)
        self._cancels = []
        size = 0
        for number, unsent in self._unsent.items():
            size += unsent.size
            # A single request may exceed the limit; several may not.
            if size > MESSAGE_BYTES and (message.begin or message.cancel):
                break
            # Filled in place: prompts are large, and adding a complete message copies it twice.
            begin = message.begin.add(call=number, timeout_s=unsent.timeout_s)
            begin.request.CopyFrom(unsent.request)
        for begin in message.begin:
            del self._unsent[begin.call]
        return message

    async def _read(self) -> None:
        while True:
            message = await self._call.read()
            if not isinstance(message, pb.SampleStreamResponse):
                raise Unavailable(f"{self._router} ended the stream")
            for event in message.events:
                receiver = self._receivers.get(event.call)
                if receiver is None:
                    continue  # Cancelled.
                if event.HasField("end"):
                    del self._receivers[event.call]
                    receiver.on_end(_error_of(event.end))
                else:
                    receiver.on_response(event.response)


def _error_of(end: pb.SampleEnd) -> ForgeError | None:
    if not end.status_code:
        return None
    code = _STATUS.get(end.status_code, grpc.StatusCode.UNKNOWN)
    return from_status(code, end.details, end.metadata)
