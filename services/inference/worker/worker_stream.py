"""Many Prefills and Decodes on one kept stream: the worker's side of WorkerStream.

Owns how much of a call its router may leave unread, and the release of prompts that no one can
fetch any more. Not here: the stream and its calls (`forge.runtime.rpc.served_stream`), and what a
call does (`service`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any, ClassVar

from forge.core.errors import InvalidArgument
from forge.runtime.rpc.served_stream import ServedStream, ServedStreams
from forge.runtime.rpc.status import to_status
from forge.runtime.telemetry import bind_context, log
from forge.runtime.tracing import SpanRole, enter_span, is_tracing, start_span
from forge.v1 import inference_pb2 as pb
from forge.v1 import inference_pb2_grpc as rpc
from services.inference.worker.metrics import STREAM_CALLS
from services.inference.worker.service import DecodeServicer, PrefillServicer

CALL_WINDOW_BYTES = 256 << 10
"""Most bytes of one call that its router has not read; then the call waits."""
_METHODS = {"prefill": "PrefillService/Prefill", "decode": "DecodeService/Decode"}


class WorkerServicer(rpc.WorkerServiceServicer):
    """The stream of a worker of any role."""

    def __init__(self, *, prefill: PrefillServicer | None, decode: DecodeServicer | None) -> None:
        """The servicers of this worker's role, or both."""
        self._streams = ServedStreams(lambda: _WorkerStream(prefill, decode))

    async def WorkerStream(  # noqa: N802 - named by the proto
        self, requests: AsyncIterator[pb.WorkerStreamRequest], context: Any
    ) -> AsyncIterator[pb.WorkerStreamResponse]:
        """Serve many calls on one stream."""
        async with aclosing(self._streams.serve(requests)) as responses:
            async for response in responses:
                yield response

    def drain(self) -> None:
        """Refuse new calls; each stream ends when its open calls have."""
        self._streams.drain()


class _WorkerStream(ServedStream):
    """The state of one call of WorkerStream."""

    message_type = pb.WorkerStreamResponse
    served_by: ClassVar[str] = "worker"

    def __init__(self, prefill: PrefillServicer | None, decode: DecodeServicer | None) -> None:
        super().__init__()
        self._prefill = prefill
        self._decode = decode
        self._unread: dict[int, int] = {}
        """Bytes by call, which its router has not read."""
        self._reads: dict[int, asyncio.Event] = {}
        """Events of calls that wait; set when the router has read enough."""
        self._held: dict[str, float] = {}
        """Prompts that were read for this stream, and when they expire, in this order."""

    def answer(self, begin: pb.WorkerBegin) -> AsyncGenerator[Any, None]:
        """See `ServedStream`. Raises InvalidArgument for a call that is not of this role."""
        kind = begin.WhichOneof("request")
        if kind == "prefill" and self._prefill is not None:
            bind_context(trajectory_id=begin.prefill.session_id)
            answer: AsyncGenerator[Any, None] = self._read_prompt(begin.prefill, self._prefill)
        elif kind == "decode" and self._decode is not None:
            bind_context(trajectory_id=begin.decode.session_id)
            answer = self._decode.answer(begin.decode)
        else:
            raise InvalidArgument(f"request = {kind}: this worker does not have the role for it")
        return _with_span(answer, _METHODS[kind], begin.traceparent) if is_tracing() else answer

    async def _read_prompt(
        self, request: pb.PrefillRequest, servicer: PrefillServicer
    ) -> AsyncGenerator[pb.PrefillResponse, None]:
        read = await servicer.Prefill(request, None)
        now_s = time.monotonic()
        while self._held and next(iter(self._held.values())) < now_s:
            del self._held[next(iter(self._held))]
        self._held[request.request_id] = now_s + request.hold_s
        yield read

    def on_response(self, begin: pb.WorkerBegin, response: Any) -> None:
        """Send it at once."""
        field = "prefill" if isinstance(response, pb.PrefillResponse) else "decode"
        size = self.put(begin.call, field, response)
        self._unread[begin.call] = self._unread.get(begin.call, 0) + size

    async def has_room(self, call: int) -> None:
        """Wait for the router to read the call, and the stream."""
        await super().has_room(call)
        while self._unread.get(call, 0) >= CALL_WINDOW_BYTES:
            read = self._reads[call] = asyncio.Event()
            await read.wait()

    def on_request(self, request: pb.WorkerStreamRequest) -> None:
        """Note the bytes that the router has read, and release prompts that it will not fetch."""
        for read in request.read:
            if read.call in self._unread:
                self._unread[read.call] -= read.bytes
                if (waiting := self._reads.pop(read.call, None)) is not None:
                    waiting.set()
        for request_id in request.release:
            self._release(request_id)

    def _release(self, request_id: str) -> None:
        if self._held.pop(request_id, None) is not None and self._prefill is not None:
            self._prefill.release(request_id)

    def before_end(self, call: int) -> None:
        """Drop the count of unread bytes, and the wait for reads of a call that is late."""
        self.forget(call)

    def forget(self, call: int) -> None:
        """See `before_end`; of a cancelled call."""
        self._unread.pop(call, None)
        self._reads.pop(call, None)

    def on_end_of_stream(self) -> None:
        """Release the prompts: only calls of this stream's router would fetch them."""
        for request_id in list(self._held):
            self._release(request_id)

    def on_code(self, code: str, error: Exception | None) -> None:
        """Count a call; log a failed one."""
        STREAM_CALLS.labels(code).inc()
        if code == "INTERNAL":
            log.error("worker_call_failed", exc_info=error)
        elif error is not None:
            log.info("worker_call_refused", code=code, error=str(error))


async def _with_span(
    answer: AsyncGenerator[Any, None], method: str, parent: str
) -> AsyncGenerator[Any, None]:
    """Yield the responses of a call within its span, as the server's interceptor makes it."""
    span = start_span(
        f"forge.v1.{method}",
        kind=SpanRole.SERVER,
        parent=parent,
        attributes={"rpc.system.name": "grpc", "rpc.method": f"forge.v1.{method}"},
    )
    enter_span(span)
    code = "CANCELLED"
    try:
        async with aclosing(answer) as responses:
            async for response in responses:
                yield response
        code = "OK"
    except Exception as error:
        code = to_status(error)[0].name
        span.fail(error)
        raise
    finally:
        span.set({"rpc.response.status_code": code})
        span.end()
