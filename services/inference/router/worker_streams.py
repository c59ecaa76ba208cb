"""Calls to workers: on one kept stream per worker, or one RPC each for a worker without streams.

Owns the streams, and the responses of a call until they are read. A call on a stream behaves as a
call of gRPC: it is awaited or iterated, cancelled, and ends with AioRpcError. Not here: which calls
are made (`attempt`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Generator
from contextlib import suppress
from typing import Any

import grpc
import grpc.aio

from forge.core.errors import DeadlineExceeded, ForgeError, InvalidArgument, Unavailable
from forge.runtime.rpc.channel import Channels
from forge.runtime.rpc.kept_stream import KeptStream
from forge.runtime.rpc.status import trailing_metadata
from forge.runtime.tracing import current_span
from forge.v1 import inference_pb2 as pb
from forge.v1 import inference_pb2_grpc as rpc
from services.inference.router.fleet.workers import Worker

READ_BYTES = 128 << 10
"""Bytes of a call after which its worker learns that they were read; half of its window."""
_RELEASE_TIMEOUT_S = 1.0
_END = object()


class _StreamLost(Unavailable):
    """The stream to the worker was lost; the worker did not answer the call."""


class WorkerStreams:
    """One stream per worker that serves them; a lost stream is replaced."""

    def __init__(self, channels: Channels) -> None:
        self._channels = channels
        self._streams: dict[str, _WorkerStream] = {}
        """By address."""
        self._releases: set[asyncio.Task[Any]] = set()

    def prefill(self, worker: Worker, request: pb.PrefillRequest, *, timeout_s: float) -> Any:
        """Begin a Prefill; await the result. Raises InvalidArgument for a request larger than a
        message."""
        if worker.serves_stream:
            return StreamedCall(self._stream(worker), request, timeout_s=timeout_s)
        stub = self._channels.stub(rpc.PrefillServiceStub, worker.address)
        return stub.Prefill(request, timeout=timeout_s)

    def decode(self, worker: Worker, request: pb.DecodeRequest, *, timeout_s: float) -> Any:
        """Begin a Decode; iterate over the result. Raises as `prefill`."""
        if worker.serves_stream:
            return StreamedCall(self._stream(worker), request, timeout_s=timeout_s)
        stub = self._channels.stub(rpc.DecodeServiceStub, worker.address)
        return stub.Decode(request, timeout=timeout_s)

    def release(self, worker: Worker, request_id: str, *, session_id: str) -> None:
        """Let a worker drop a held prompt now; otherwise it drops the prompt after `hold_s`."""
        if worker.serves_stream:
            stream = self._streams.get(worker.address)
            # With the stream of its Prefill the prompt is gone.
            if stream is not None and not stream.lost:
                stream.release(request_id)
            return
        stub: Any = self._channels.stub(rpc.PrefillServiceStub, worker.address)
        request = pb.ReleaseKvRequest(request_id=request_id, session_id=session_id)
        release = asyncio.ensure_future(
            _ignored(stub.ReleaseKv(request, timeout=_RELEASE_TIMEOUT_S))
        )
        self._releases.add(release)
        release.add_done_callback(self._releases.discard)

    async def close(self) -> None:
        """End every stream and its calls."""
        streams, self._streams = list(self._streams.values()), {}
        for stream in streams:
            await stream.close_stream()

    def _stream(self, worker: Worker) -> _WorkerStream:
        stream = self._streams.get(worker.address)
        if stream is None or stream.lost:
            self._streams = {at: one for at, one in self._streams.items() if not one.lost}
            stub: Any = self._channels.stub(rpc.WorkerServiceStub, worker.address)
            stream = _WorkerStream(stub.WorkerStream(), peer=worker.instance_id)
            self._streams[worker.address] = stream
        return stream


async def _ignored(call: Any) -> None:
    with suppress(grpc.aio.AioRpcError):
        await call


class _WorkerStream(KeptStream):
    """One WorkerStream RPC and its open calls."""

    message_type = pb.WorkerStreamRequest
    lost_event = "worker_stream_lost"
    own_process = "router"

    def __init__(self, call: Any, *, peer: str) -> None:
        super().__init__(call, peer=peer)
        self._read_bytes: dict[int, int] = {}
        """By call."""
        self._released: list[str] = []

    def lost_error(self, words: str) -> ForgeError:
        """See `KeptStream`."""
        return _StreamLost(words)

    def add_request(self, begin: pb.WorkerBegin, request: Any) -> None:
        """See `KeptStream`."""
        into = begin.prefill if isinstance(request, pb.PrefillRequest) else begin.decode
        into.CopyFrom(request)

    def response_in(self, event: pb.WorkerEvent) -> Any:
        """See `KeptStream`."""
        return event.decode if event.HasField("decode") else event.prefill

    def note_read(self, call: int, size: int) -> None:
        """Let the worker send so much more of a call."""
        self._read_bytes[call] = self._read_bytes.get(call, 0) + size
        self.wake()

    def release(self, request_id: str) -> None:
        """See `WorkerStreams.release`."""
        self._released.append(request_id)
        self.wake()

    def has_more(self) -> bool:
        """See `KeptStream`."""
        return bool(self._read_bytes or self._released) or super().has_more()

    def next_message(self) -> pb.WorkerStreamRequest:
        """See `KeptStream`."""
        message: pb.WorkerStreamRequest = super().next_message()
        for call, size in self._read_bytes.items():
            message.read.add(call=call, bytes=size)
        message.release.extend(self._released)
        self._read_bytes, self._released = {}, []
        return message


class StreamedCall:
    """One call on a stream."""

    def __init__(self, stream: _WorkerStream, request: Any, *, timeout_s: float) -> None:
        """Raises InvalidArgument for a request larger than a message."""
        self._stream = stream
        self._responses: deque[Any] = deque()
        self._unread_bytes = 0
        """Bytes of responses that were read here and not yet reported to the worker."""
        self._waiter: asyncio.Future[None] | None = None
        self._end: Any = None
        """`_END` or an exception, once the call has ended."""
        self._number = 0
        self._deadline: asyncio.TimerHandle | None = None
        if timeout_s <= 0:
            self._expire(timeout_s)
            return
        try:
            self._number = stream.send_request(
                request, self, timeout_s=timeout_s, traceparent=current_span().traceparent
            )
        except _StreamLost as error:
            self.on_end(error)
            return
        # The worker keeps the same deadline; this one is for a worker that hangs.
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(timeout_s, self._expire, timeout_s)

    def on_response(self, response: Any) -> None:
        """Queue a response of the worker."""
        self._responses.append(response)
        self._wake()

    def on_end(self, error: ForgeError | None) -> None:
        """End the call, behind the queued responses."""
        self._finish(_END if error is None else _rpc_error(error))

    def cancel(self) -> bool:
        """End the call; its reader gets CancelledError. False if it has ended."""
        if self._end is not None:
            return False
        self._stream.cancel_request(self._number)
        self._responses.clear()
        self._finish(asyncio.CancelledError())
        return True

    def __aiter__(self) -> StreamedCall:
        return self

    async def __anext__(self) -> Any:
        while not self._responses:
            if self._end is not None:
                raise StopAsyncIteration if self._end is _END else self._end
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        response = self._responses.popleft()
        if self._end is None:
            self._count_read(response)
        return response

    def __await__(self) -> Generator[Any, None, Any]:
        return self._only().__await__()

    async def _only(self) -> Any:
        """Return the response of a call with one, once the call has ended."""
        try:
            response = await anext(self)
            async for _ in self:
                raise _rpc_error(InvalidArgument("the worker sent two responses"))
        except asyncio.CancelledError:
            self.cancel()
            raise
        except StopAsyncIteration:
            raise _rpc_error(_StreamLost("the worker ended the call without a response")) from None
        return response

    def _count_read(self, response: Any) -> None:
        self._unread_bytes += response.ByteSize()
        if self._unread_bytes >= READ_BYTES:
            self._stream.note_read(self._number, self._unread_bytes)
            self._unread_bytes = 0

    def _expire(self, timeout_s: float) -> None:
        self._stream.cancel_request(self._number)
        late = DeadlineExceeded(f"the worker did not answer within {timeout_s:g} s")
        # As of gRPC: not the answer of a worker.
        self._finish(_rpc_error(late, answered=False))

    def _finish(self, end: Any) -> None:
        if self._end is None:
            self._end = end
            if self._deadline is not None:
                self._deadline.cancel()
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _rpc_error(error: ForgeError, *, answered: bool = True) -> grpc.aio.AioRpcError:
    """Return the error as a call of gRPC would end with it; a lost stream is no answer."""
    answered = answered and not isinstance(error, _StreamLost)
    pairs = trailing_metadata(error) if answered else ()
    return grpc.aio.AioRpcError(
        grpc.StatusCode[error.code],
        grpc.aio.Metadata(),
        grpc.aio.Metadata(*pairs),
        details=str(error),
    )
