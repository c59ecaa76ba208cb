"""The gateway's side of a kept stream, over a scripted call."""

from __future__ import annotations

import asyncio
import traceback
from types import SimpleNamespace
from typing import Any, cast

import grpc
import grpc.aio
import pytest
from structlog.testing import capture_logs

from forge.core.errors import Unavailable
from forge.runtime.rpc.kept_stream import MESSAGE_BYTES
from forge.v1 import inference_pb2 as pb
from services.gateway.errors import RouterLost
from services.gateway.router import router_stream
from services.gateway.router.router_stream import RouterStream, RouterStreams
from services.gateway.router.sample_call import SampleCall
from tests.support.runtime.waiting import settle

WAIT_S = 30.0


class Call:
    """The client side of one SampleStream call."""

    def __init__(self) -> None:
        self.taken: list[pb.SampleStreamRequest] = []
        self.takes = asyncio.Event()
        """Until it is set, the router takes nothing."""
        self.ends: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        """With the error that ends the call."""

    async def write(self, message: pb.SampleStreamRequest) -> None:
        await self.takes.wait()
        self.taken.append(message)

    async def read(self) -> Any:
        return await self.ends

    def cancel(self) -> bool:
        return True

    @property
    def begun(self) -> list[int]:
        return [begin.call for message in self.taken for begin in message.begin]

    @property
    def cancelled(self) -> list[int]:
        return [call for message in self.taken for call in message.cancel]


class OneStream:
    """The only stream of a gateway."""

    def __init__(self, stream: RouterStream) -> None:
        self._stream = stream

    async def pick_stream(self, *, timeout_s: float) -> RouterStream:
        return self._stream


async def begin(stream: RouterStream, *, size: int = 10) -> SampleCall:
    """A call that is never sampled again."""
    call = SampleCall(cast(Any, OneStream(stream)), timeout_s=WAIT_S, retry_for_s=0.0)
    call.set_request(pb.SampleRequest(prompt_ids=bytes(size)))
    await call.send_request()
    return call


async def test_cancelled_call_is_not_sent() -> None:
    """The router never sees it; a cancel before its call would be ignored."""
    call = Call()
    stream = RouterStream(call, peer="r")
    answers = [await begin(stream, size=MESSAGE_BYTES // 2 + 1) for _ in range(3)]
    answers[2].cancel_attempt()
    call.takes.set()
    await settle()
    assert (call.begun, call.cancelled) == ([1, 2], [])
    answers[0].cancel_attempt()
    await settle()
    assert call.cancelled == [1]
    await stream.close_stream()


async def test_queue_of_a_stalled_router_holds_only_live_calls() -> None:
    """Cancelled calls leave the queue, in any number."""
    call = Call()
    stream = RouterStream(call, peer="r")
    for _ in range(100):
        answer = await begin(stream)
        await settle()
        answer.cancel_attempt()
    wanted = await begin(stream)
    call.takes.set()
    await settle()
    # The first was in the router's hands before it was taken back.
    assert (call.begun, call.cancelled) == ([1, 101], [1])
    wanted.cancel_attempt()
    await stream.close_stream()


async def test_cancels_leave_a_large_request_its_room() -> None:
    """A message holds one request of any size, and no cancel that would make it too large."""
    call = Call()
    stream = RouterStream(call, peer="r")
    call.takes.set()
    many = [await begin(stream) for _ in range(2000)]
    await settle()
    for answer in many:
        answer.cancel_attempt()
    await begin(stream, size=MESSAGE_BYTES + 1)
    await settle()
    assert call.cancelled == list(range(1, 2001))
    (last,) = [message for message in call.taken if message.ByteSize() > MESSAGE_BYTES]
    assert not last.cancel
    await stream.close_stream()


@pytest.mark.parametrize(
    "code", [grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAUTHENTICATED]
)
async def test_end_of_a_stream_is_unavailable_to_its_calls(code: grpc.StatusCode) -> None:
    """For any status: each call may be repeated on another router."""
    call = Call()
    stream = RouterStream(call, peer="r")
    answer = await begin(stream)
    await settle()
    none = grpc.aio.Metadata()
    call.ends.set_exception(grpc.aio.AioRpcError(code, none, none, details="too much of it"))
    with pytest.raises(Unavailable, match="the stream to r was lost: too much of it") as lost:
        await answer.read_response()
    assert type(lost.value) is RouterLost
    with pytest.raises(Unavailable):
        await begin(stream)


@pytest.mark.parametrize(("open_calls", "lines"), [(0, []), (1, [1])], ids=["idle", "in a call"])
async def test_planned_end_is_logged_only_with_open_calls(
    open_calls: int, lines: list[int]
) -> None:
    """The end of an idle stream is no loss: a draining router ends its streams after the calls."""
    call = Call()
    call.takes.set()
    stream = RouterStream(call, peer="r")
    for _ in range(open_calls):
        await begin(stream)
    with capture_logs() as logs:
        call.ends.set_result(grpc.aio.EOF)
        await settle()
    assert stream.lost
    assert [log["calls"] for log in logs if log["event"] == "router_stream_lost"] == lines


async def test_each_call_of_a_lost_stream_has_an_error_of_its_own() -> None:
    """One shared error would keep the frames of all calls in memory."""
    call = Call()
    stream = RouterStream(call, peer="r")
    calls = [await begin(stream) for _ in range(100)]
    reads = [asyncio.create_task(call.read_response()) for call in calls]
    await settle()
    call.ends.set_exception(Unavailable("gone"))
    errors = await asyncio.gather(*reads, return_exceptions=True)
    raised = [error for error in errors if isinstance(error, Unavailable)]
    frames = [len(list(traceback.walk_tb(error.__traceback__))) for error in raised]
    assert len(frames) == 100
    assert max(frames) < 10


async def test_stream_closed_at_once_ends_its_calls() -> None:
    """Before it has sent or read anything."""
    stream = RouterStream(Call(), peer="r")
    answer = await begin(stream)
    await stream.close_stream()
    with pytest.raises(Unavailable, match="the stream to r was closed"):
        await answer.read_response()
    with pytest.raises(Unavailable):
        await begin(stream)


class Routers:
    """Discovery that shows two routers, and is asked for the first that may be picked."""

    def __init__(self) -> None:
        self.calls: dict[str, list[Call]] = {"a": [], "b": []}

    def instances(self) -> list[Any]:
        return [SimpleNamespace(address=name, instance_id=name) for name in self.calls]

    async def pick(self, *, where: Any, timeout_s: float) -> tuple[Any, Any]:
        instance = next(one for one in self.instances() if where is None or where(one))

        def made() -> Call:
            self.calls[instance.address].append(Call())
            return self.calls[instance.address][-1]

        return instance, SimpleNamespace(SampleStream=made)


async def test_lost_router_is_avoided(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a while, and while there is another: discovery lists it until its lease has expired."""
    routers = Routers()
    streams = RouterStreams(cast(Any, routers))
    monkeypatch.setattr(router_stream, "AVOID_LOST_S", 3600.0)

    async def picked() -> list[int]:
        await streams.pick_stream(timeout_s=WAIT_S)
        return [len(calls) for calls in routers.calls.values()]

    async def lose(name: str) -> None:
        await settle()
        routers.calls[name][-1].ends.set_exception(Unavailable("gone"))
        await settle()

    assert await picked() == [1, 0]
    await lose("a")
    assert await picked() == [1, 1]
    assert await picked() == [1, 1]
    await lose("b")
    assert await picked() == [2, 1]
    await lose("a")
    monkeypatch.setattr(router_stream, "AVOID_LOST_S", 0.0)
    assert await picked() == [3, 1]
    assert set(streams._streams) == {"a"}
    await streams.close_streams()
