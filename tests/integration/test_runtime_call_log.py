"""Log lines of calls: their level, and the trajectory in them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import grpc.aio
import pytest
import pytest_asyncio
from structlog.contextvars import merge_contextvars
from structlog.testing import capture_logs

from forge.core.errors import NotFound
from forge.runtime.rpc import Channels, RpcServer, interceptor
from forge.runtime.security.credentials import Security
from forge.runtime.security.tokens import Keyring
from forge.v1 import (
    inference_pb2,
    inference_pb2_grpc,
    pool_pb2,
    pool_pb2_grpc,
    scheduler_pb2,
    scheduler_pb2_grpc,
)
from services.inference.router.sample_stream import SampleStreams
from tests.support.runtime.waiting import until

SERVICES = ("PoolService", "SchedulerService", "InferenceService", "PrefillService")
LATE_S = 30


class Servicer(
    pool_pb2_grpc.PoolServiceServicer,
    scheduler_pb2_grpc.SchedulerServiceServicer,
    inference_pb2_grpc.InferenceServiceServicer,
    inference_pb2_grpc.PrefillServiceServicer,
):
    """Answers at once; FetchKv does not end."""

    async def SealTrajectory(self, request: Any, context: Any) -> Any:
        raise NotFound(request.trajectory_id)

    async def LeaseRollouts(self, request: Any, context: Any) -> Any:
        return scheduler_pb2.LeaseRolloutsResponse()

    async def GetSchedulerStatus(self, request: Any, context: Any) -> Any:
        return scheduler_pb2.GetSchedulerStatusResponse()

    async def Prefill(self, request: Any, context: Any) -> Any:
        return inference_pb2.PrefillResponse()

    async def FetchKv(self, request: Any, context: Any) -> AsyncIterator[Any]:
        yield inference_pb2.FetchKvResponse()
        await asyncio.Event().wait()

    async def SampleStream(self, requests: Any, context: Any) -> AsyncIterator[Any]:
        async def defect(request: Any) -> AsyncGenerator[Any, None]:
            raise ZeroDivisionError
            yield

        async for response in SampleStreams(defect, interval_s=0).serve(requests):
            yield response


@pytest_asyncio.fixture
async def channel() -> AsyncIterator[grpc.aio.Channel]:
    """A channel to a server of all services."""
    security = Security(Keyring.from_bytes(b"k" * 32), subject="test")
    server = RpcServer(service="test", host="127.0.0.1", port=0, security=security)
    for name in SERVICES:
        modules = (pool_pb2_grpc, scheduler_pb2_grpc, inference_pb2_grpc)
        adders = [getattr(module, f"add_{name}Servicer_to_server", None) for module in modules]
        server.add_service(
            next(adder for adder in adders if adder), Servicer(), full_name=f"forge.v1.{name}"
        )
    channels = Channels(security)
    yield channels.get(await server.start())
    await channels.close()
    await server.stop(grace_s=0)


@pytest.fixture
def every_call_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any time is beyond the limits."""
    monkeypatch.setattr(interceptor, "_SLOW_S", -math.inf)
    monkeypatch.setattr(interceptor, "_SLOW_SHARE", 0.0)


def rpc_lines(logs: list[Any]) -> list[Any]:
    return [line for line in logs if line["event"] == "rpc"]


async def test_slow_call_is_logged_at_info(
    channel: grpc.aio.Channel, every_call_is_slow: None
) -> None:
    with capture_logs() as logs:
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        await stub.GetSchedulerStatus(scheduler_pb2.GetSchedulerStatusRequest(), timeout=LATE_S)
        await until(lambda: rpc_lines(logs))
    assert [line["log_level"] for line in rpc_lines(logs)] == ["info"]


async def test_long_poll_within_its_wait_is_logged_at_debug(
    channel: grpc.aio.Channel, every_call_is_slow: None
) -> None:
    with capture_logs() as logs:
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        await stub.LeaseRollouts(scheduler_pb2.LeaseRolloutsRequest(wait_s=10), timeout=LATE_S)
        await until(lambda: rpc_lines(logs))
    assert [line["log_level"] for line in rpc_lines(logs)] == ["debug"]


async def test_call_within_a_tenth_of_its_deadline_is_logged_at_debug(
    channel: grpc.aio.Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefill of a long prompt takes seconds, and its callers expect that."""
    monkeypatch.setattr(interceptor, "_SLOW_S", -math.inf)
    with capture_logs() as logs:
        stub = inference_pb2_grpc.PrefillServiceStub(channel)
        await stub.Prefill(inference_pb2.PrefillRequest(), timeout=3600)
        await until(lambda: rpc_lines(logs))
    assert [line["log_level"] for line in rpc_lines(logs)] == ["debug"]


async def test_cancelled_stream_is_logged_at_debug_with_its_session(
    channel: grpc.aio.Channel, every_call_is_slow: None
) -> None:
    with capture_logs([merge_contextvars]) as logs:
        stub = inference_pb2_grpc.PrefillServiceStub(channel)
        call: Any = stub.FetchKv(inference_pb2.FetchKvRequest(session_id="t:0:0"))
        await call.read()
        call.cancel()
        await until(lambda: rpc_lines(logs))
    (line,) = rpc_lines(logs)
    assert (line["log_level"], line["code"]) == ("debug", "CANCELLED")
    assert line["trajectory_id"] == "t:0:0"


async def test_line_of_a_service_call_has_the_trajectory_of_its_request(
    channel: grpc.aio.Channel,
) -> None:
    with capture_logs([merge_contextvars]) as logs:
        stub = pool_pb2_grpc.PoolServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.SealTrajectory(
                pool_pb2.SealTrajectoryRequest(trajectory_id="t:0:1"), timeout=LATE_S
            )
        await until(lambda: rpc_lines(logs))
    (line,) = rpc_lines(logs)
    assert (line["log_level"], line["trajectory_id"]) == ("info", "t:0:1")


async def test_failure_on_a_sample_stream_names_its_trajectory(channel: grpc.aio.Channel) -> None:
    """One stream carries the requests of many trajectories."""
    begin = [
        inference_pb2.SampleBegin(
            call=call,
            timeout_s=LATE_S,
            request=inference_pb2.SampleRequest(session_id=f"t:0:{call}"),
        )
        for call in (1, 2)
    ]
    with capture_logs([merge_contextvars]) as logs:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        stream: Any = stub.SampleStream(iter([inference_pb2.SampleStreamRequest(begin=begin)]))
        ends = [event.call async for response in stream for event in response.events]
        await until(lambda: rpc_lines(logs))
    assert sorted(ends) == [1, 2]
    failures = [line["trajectory_id"] for line in logs if line["event"] == "sample_failed"]
    assert sorted(failures) == ["t:0:1", "t:0:2"]
