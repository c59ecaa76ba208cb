"""Sampling over streams that are kept, one per router.

Owns the streams and the calls open on them: what waits to be sent, whose answer came, what a
call's end or the loss of its stream amounts to. Owns no retry and no choice among attempts.

A reader never waits for a call: what an agent is too slow for is joined into one response, which
the length of its answer bounds. So nobody slow holds the others, and routers can rely on their
messages being taken.
"""

from __future__ import annotations

import asyncio
import contextvars
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import grpc
import grpc.aio

from forge.core.errors import DeadlineExceeded, ForgeError, InvalidArgument, Unavailable
from forge.runtime.rpc import tokens
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
"""Most that several requests take in one message."""
ROOM_BYTES = 1 << 10
"""Of a message, for what is around a request that fills it."""
SHUNNED_S = 2.0
"""A router whose stream was lost is left alone for this long while there is another."""
MOST_WAITING = 64
"""Responses of one call that are kept apart until it is read."""
_STATUS = {code.value[0]: code for code in grpc.StatusCode}


class _Begin(NamedTuple):
    """A call that is yet to be sent."""

    request: pb.SampleRequest
    size: int
    """Bytes of the request."""
    timeout_s: float


class SampleStreams:
    """A stream to each router that was asked, made anew when it is lost."""

    def __init__(self, remote: Remote[InferenceServiceAsyncStub]) -> None:
        self._remote = remote
        self._streams: dict[str, RouterStream] = {}
        """By address."""

    async def pick(self, *, timeout_s: float) -> RouterStream:
        """The stream to some router; waits for one to appear. Raises `Unavailable`."""
        instance, stub = await self._remote.pick(where=self._sound(), timeout_s=timeout_s)
        stream = self._streams.get(instance.address)
        if stream is None or stream.lost:
            shunned = self._shunned()
            self._streams = {
                at: one for at, one in self._streams.items() if not one.lost or at in shunned
            }
            stream = self._streams[instance.address] = RouterStream(
                stub.SampleStream(), router=instance.instance_id
            )
        return stream

    def _sound(self) -> Callable[[Instance], bool] | None:
        """Who may be picked: a router that is gone is in discovery until its lease has run out."""
        shunned = self._shunned()
        if not shunned or all(one.address in shunned for one in self._remote.instances()):
            return None
        return lambda instance: instance.address not in shunned

    def _shunned(self) -> set[str]:
        now_s = asyncio.get_running_loop().time()
        return {at for at, one in self._streams.items() if one.lost_s > now_s - SHUNNED_S}

    async def close(self) -> None:
        """Ends every stream, and the calls on them with `RouterLost`."""
        streams, self._streams = list(self._streams.values()), {}
        for stream in streams:
            await stream.close()


class RouterStream:
    """One SampleStream call, and the calls that are open on it."""

    def __init__(self, call: Any, *, router: str) -> None:
        self._call = call
        self._router = router
        self._answers: dict[int, Answer] = {}
        self._begins: dict[int, _Begin] = {}
        """By number, the first first."""
        self._cancels: list[int] = []
        """Calls that were sent and are not wanted any more."""
        self._more = asyncio.Event()
        self._last_call = 0
        self.lost_s = -math.inf
        """When it was lost, in the loop's time."""
        # Not in the context of the call that came first: it would log as that session.
        loop = asyncio.get_running_loop()
        self._task = loop.create_task(self._run(), context=contextvars.Context())

    @property
    def lost(self) -> bool:
        return self.lost_s > -math.inf

    def begin(self, request: pb.SampleRequest, *, timeout_s: float) -> Answer:
        """Asks for an answer. Raises `InvalidArgument` for a request that no message can hold,
        `RouterLost` when the stream was."""
        size = request.ByteSize()
        if size > MAX_MESSAGE_BYTES - ROOM_BYTES:
            raise InvalidArgument(
                f"the request has {size} bytes, more than the {MAX_MESSAGE_BYTES - ROOM_BYTES} "
                "that a message to a router holds"
            )
        if self.lost:
            raise RouterLost(f"the stream to {self._router} was lost")
        self._last_call += 1
        number = self._last_call
        answer = self._answers[number] = Answer(self, number, timeout_s)
        self._begins[number] = _Begin(request, size, timeout_s)
        self._more.set()
        return answer

    def cancel(self, number: int) -> None:
        """Tells the router, unless the call has ended or was never sent."""
        if self._answers.pop(number, None) is None:
            return
        if self._begins.pop(number, None) is None:
            self._cancels.append(number)
            self._more.set()

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.wait({self._task})
        # A task that is cancelled before its first step never takes it.
        self._end("was closed")

    async def _run(self) -> None:
        why = "was closed"
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._write())
                tasks.create_task(self._read())
        except* Exception as group:
            why = f"was lost: {self._told(group)}"
        finally:
            self._end(why)

    def _end(self, why: str) -> None:
        self.lost_s = asyncio.get_running_loop().time()
        self._call.cancel()
        self._begins.clear()
        answers, self._answers = self._answers, {}
        for answer in answers.values():
            # Each its own: an error keeps the frames of everybody who raises it. And none of the
            # stream's: what it was refused for, no call has done.
            answer.end(RouterLost(f"the stream to {self._router} {why}"))

    def _told(self, group: ExceptionGroup) -> str:
        """Logs why the stream ended; what of that its calls may tell."""
        first = group.exceptions[0]
        known = from_rpc_error(first) if isinstance(first, grpc.aio.AioRpcError) else first
        bug = None if isinstance(known, ForgeError) else known
        (log.info if bug is None else log.error)(
            "router_stream_lost",
            router=self._router,
            calls=len(self._answers),
            error=str(known),
            exc_info=bug,
        )
        return str(known) if bug is None else "internal error; the gateway's log has the cause"

    async def _write(self) -> None:
        while True:
            await self._more.wait()
            self._more.clear()
            while self._begins or self._cancels:
                message = self._message()
                try:
                    await self._call.write(message)
                except (asyncio.InvalidStateError, grpc.aio.AioRpcError):
                    return  # The call has ended: reading tells how.

    def _message(self) -> pb.SampleStreamRequest:
        """What waits, or as much of it as goes in one message."""
        message = pb.SampleStreamRequest(cancel=self._cancels)
        self._cancels = []
        size = 0
        for number, begin in self._begins.items():
            size += begin.size
            # One by itself may be of any size; several things go together only in so much.
            if size > MESSAGE_BYTES and (message.begin or message.cancel):
                break
            # In place, as a prompt is large and each message that it is put into copies it.
            sent = message.begin.add(call=number, timeout_s=begin.timeout_s)
            sent.request.CopyFrom(begin.request)
        for sent in message.begin:
            del self._begins[sent.call]
        return message

    async def _read(self) -> None:
        while True:
            message = await self._call.read()
            if not isinstance(message, pb.SampleStreamResponse):
                raise Unavailable(f"{self._router} ended the stream")
            for event in message.events:
                answer = self._answers.get(event.call)
                if answer is None:
                    continue  # It was cancelled.
                if event.HasField("end"):
                    del self._answers[event.call]
                    answer.end(_error_of(event.end))
                else:
                    answer.take(event.response)


class Answer:
    """What a router sends in one call."""

    __slots__ = ("_deadline", "_ended", "_error", "_number", "_responses", "_stream", "_waiter")

    def __init__(self, stream: RouterStream, number: int, timeout_s: float) -> None:
        self._stream = stream
        self._number = number
        self._responses: list[pb.SampleResponse] = []
        self._ended = False
        self._error: ForgeError | None = None
        self._waiter: asyncio.Future[None] | None = None
        loop = asyncio.get_running_loop()
        # The router keeps the same deadline; this one is for a router that hangs.
        self._deadline = loop.call_later(timeout_s, self._expire, timeout_s)

    async def read(self) -> pb.SampleResponse | None:
        """What came since the last time, as one response; None at the end, or once cancelled.
        Raises the ForgeError that the router answered, `RouterLost` if the stream was."""
        while not self._responses:
            if self._error is not None:
                raise self._error
            if self._ended:
                return None
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        responses, self._responses = self._responses, []
        return joined(responses)

    def cancel(self) -> None:
        """Nothing more is wanted: the router stops, and whoever reads gets None."""
        self._stream.cancel(self._number)
        self._responses.clear()
        self.end(None)

    def take(self, response: pb.SampleResponse) -> None:
        self._responses.append(response)
        if len(self._responses) > MOST_WAITING:
            self._responses = [joined(self._responses)]
        self._wake()

    def end(self, error: ForgeError | None) -> None:
        """The first end counts."""
        if not self._ended:
            self._ended, self._error = True, error
            self._deadline.cancel()
            self._wake()

    def _expire(self, timeout_s: float) -> None:
        self._stream.cancel(self._number)
        self.end(DeadlineExceeded(f"the router gave no whole answer within {timeout_s:g} s"))

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def joined(responses: list[pb.SampleResponse]) -> pb.SampleResponse:
    """Consecutive responses of one call as one, with what the last of them says of the end."""
    if len(responses) == 1:
        return responses[0]
    whole = pb.SampleResponse()
    for response in responses:
        whole.MergeFrom(response)
    whole.tokens.CopyFrom(tokens.joined([response.tokens for response in responses]))
    return whole


def _error_of(end: pb.SampleEnd) -> ForgeError | None:
    if not end.status_code:
        return None
    code = _STATUS.get(end.status_code, grpc.StatusCode.UNKNOWN)
    return from_status(code, end.details, end.metadata)
