"""Prefill and decode in one call, on workers of the role both: real gRPC, an engine that counts; by
an RPC, as of a worker of an earlier release, and on a kept stream."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from forge.core.errors import InvalidArgument
from forge.core.token_columns import int32_bytes
from forge.runtime.rpc.channel import Channels
from forge.v1 import inference_pb2 as pb
from forge.v1.common_pb2 import FINISH_REASON_LENGTH, FINISH_REASON_STOP
from services.inference import codec
from services.inference.engines.base import Finish
from services.inference.router.fleet.fleet import SUSPECT_S
from services.inference.worker.service import DecodeServicer
from tests.support.inference.both_workers import Engine, cluster
from tests.support.inference.weight_sources import SECURITY
from tests.support.runtime.waiting import until

both_ways = pytest.mark.parametrize("streams", [False, True], ids=["rpc", "stream"])


@pytest.mark.parametrize(
    ("announces", "streams", "calls"),
    [(True, True, []), (True, False, ["Decode"]), (False, False, ["Prefill", "Decode"])],
)
async def test_answer_takes_one_call_of_a_worker_that_can(
    announces: bool, streams: bool, calls: list[str]
) -> None:
    """On a stream it takes no RPC of its own. A worker of an earlier release gets one, or two; the
    answers are equal."""
    async with cluster(announces=announces, streams=streams) as served:
        assert await served.answer() == ([4, 5, 6, 7, 8], FINISH_REASON_LENGTH)
        assert (served.rpcs, served.engine.calls) == (calls, ["prefill", "decode"])
        assert await served.is_idle()


@pytest.mark.parametrize(
    ("sampling", "finish"),
    [({"max_tokens": 1}, FINISH_REASON_LENGTH), ({"stop_token_ids": [4]}, FINISH_REASON_STOP)],
)
@both_ways
async def test_first_token_may_end_the_answer(
    sampling: dict[str, Any], finish: int, streams: bool
) -> None:
    """Nothing is decoded then."""
    async with cluster(streams=streams) as served:
        assert await served.answer(**sampling) == ([4], finish)
        assert served.engine.calls == ["prefill"]
        assert await served.is_idle()


@pytest.mark.parametrize("failing", ["prefill", "decode"])
@both_ways
async def test_failed_call_is_made_again(failing: str, streams: bool) -> None:
    """The second one continues behind the tokens of the first; neither leaves a held prompt or
    load."""
    async with cluster(streams=streams) as served:
        served.engine.failing = [failing]
        assert await served.answer() == ([4, 5, 6, 7, 8], FINISH_REASON_LENGTH)
        assert served.engine.calls.count("prefill") == 2
        assert await served.is_idle()


@pytest.mark.parametrize(
    ("sampling", "ids", "finish"),
    [
        ({}, [4, 5, 6, 7, 8], FINISH_REASON_LENGTH),
        ({"max_tokens": 1}, [4], FINISH_REASON_LENGTH),
        ({"stop_token_ids": [4]}, [4], FINISH_REASON_STOP),
    ],
)
@both_ways
async def test_finish_reason_of_a_newer_worker_loses_no_token(
    sampling: dict[str, Any],
    ids: list[int],
    finish: int,
    streams: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The router has the tokens of the answer, and finds by itself that they are complete."""
    write_finish, newer = codec.write_finish, [9]

    def write(found: Finish | None) -> Any:
        return newer.pop() if found is not None and newer else write_finish(found)

    monkeypatch.setattr(codec, "write_finish", write)
    async with cluster(streams=streams) as served:
        assert await served.answer(**sampling) == (ids, finish)
        assert not newer
        assert await served.is_idle()


@pytest.mark.parametrize("after", [1, 3, 7])
async def test_stream_that_is_cut_loses_no_token(after: int) -> None:
    """In the middle of several answers: each continues behind the tokens that the router has, and
    its caller gets every token once, in order."""
    async with cluster() as served:
        served.engine.waits_after = after
        calls = [asyncio.create_task(served.answer(max_tokens=12)) for _ in range(4)]
        await until(lambda: served.engine.calls.count("decode") == 4)
        await until(lambda: len(served.taken()) == 4 and min(served.taken()) == after + 1)
        served.engine.goes_on.set()
        served.networks[0].cut_all()
        await until(lambda: served.harness.workers[0].suspect_until_s > 0)
        served.harness.clock.now_s += 2 * SUSPECT_S
        for call in calls:
            assert await call == (list(range(4, 16)), FINISH_REASON_LENGTH)
        assert served.engine.calls.count("prefill") == 8
        await until(served.is_idle)


@both_ways
async def test_caller_that_leaves_after_the_first_token_leaves_nothing(streams: bool) -> None:
    """The held prompt is released, and the worker's load is taken back."""
    async with cluster(streams=streams) as served:
        responses = served.run()
        assert codec.read_tokens((await anext(responses)).tokens).ids[0] == 4
        await responses.aclose()
        await until(served.is_idle)


async def test_worker_without_the_role_both_refuses_to_read() -> None:
    """By name of the field, before anything is done."""
    engine = Engine()
    servicer = DecodeServicer(engine, Channels(SECURITY), silence_s=10)
    request = pb.DecodeRequest(request_id="r", prompt_ids=int32_bytes([1]), prefill=True)
    request.sampling.max_tokens = 1
    with pytest.raises(InvalidArgument, match="prefill"):
        async for _ in servicer.Decode(request, None):
            pass
    assert not engine.calls
