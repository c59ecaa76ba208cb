"""The runner's reports of results: repeated until the scheduler has them, each settled by itself.

The scheduler is a fake that leases given rollouts and records the reports.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from structlog.testing import capture_logs

from forge.agents import lease_renewal
from forge.agents import runner as runner_module
from forge.agents.rollout import RolloutResult
from forge.core.errors import Unavailable
from forge.v1 import scheduler_pb2 as pb
from tests.support.agents.scheduler_stand_in import StandIn, Work, working
from tests.support.agents.tasks import lease


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "PAUSE_S", 0.0)
    monkeypatch.setattr(lease_renewal, "PAUSE_S", 0.0)


async def test_report_under_way_is_no_lost_lease() -> None:
    """The scheduler has ended the lease with the report, whose response is not here yet: nothing is
    logged, and the rollout keeps its place."""
    scheduler, work = StandIn(lease(0, lease_s=0.03), lease(1)), Work()
    answered = asyncio.Event()
    report = scheduler.FinishRollouts

    async def finish(request: Any) -> Any:
        response = await report(request)
        scheduler.lost = ["lease-0"]
        await answered.wait()
        return response

    scheduler.FinishRollouts = finish  # type: ignore[method-assign]
    work.go.set()
    with capture_logs() as logged:
        async with working(scheduler, work, concurrency=1):
            await scheduler.until_reported(1)
            while not scheduler.renewed.empty():
                scheduler.renewed.get_nowait()
            for _ in range(3):
                assert await scheduler.renewed.get() == ["lease-0"]
            assert scheduler.asked == [1]
            answered.set()
            await scheduler.until_reported(2)
    assert set(scheduler.outcomes) == {"lease-0", "lease-1"}
    assert "lease_lost" not in [line["event"] for line in logged]


async def test_scheduler_outage_loses_no_rollout_result() -> None:
    """Reports are repeated until they are answered; the rollout keeps its place until then."""
    scheduler, work = StandIn(lease(0), lease(1)), Work()
    scheduler.refusals["FinishRollouts"] = [Unavailable("no leader")] * 3
    work.go.set()
    async with working(scheduler, work, concurrency=1):
        await scheduler.until_reported(2)
    assert set(scheduler.outcomes) == {"lease-0", "lease-1"}


async def test_results_of_an_unreachable_shard_hold_back_no_later_ones() -> None:
    """The scheduler settles what it can of each call, and refuses the call: a repeated one also has
    the results since."""
    scheduler, work = StandIn(lease(0), lease(1)), Work()
    calls: list[set[str]] = []

    async def finish(request: Any) -> Any:
        calls.append({outcome.lease_id for outcome in request.outcomes})
        if len(calls[-1]) < 2:
            work.go.set()
            raise Unavailable("pool shard s1 does not answer")
        return await report(request)

    report, scheduler.FinishRollouts = scheduler.FinishRollouts, finish  # type: ignore[method-assign]
    first = asyncio.Event()

    async def attempt(claim: pb.RolloutLease) -> RolloutResult:
        if claim.lease_id == "lease-0":
            first.set()
            return RolloutResult(lease_id=claim.lease_id, trajectory_id=claim.trajectory_id)
        return await work(claim)

    async with working(scheduler, attempt):
        await scheduler.until_reported(2)
    assert calls[0] == {"lease-0"} and calls[-1] == {"lease-0", "lease-1"}


async def test_a_refused_result_is_logged_and_not_reported_again() -> None:
    """The others of its call are settled."""
    scheduler, work = StandIn(lease(0), lease(1)), Work()
    report = scheduler.FinishRollouts

    async def finish(request: Any) -> Any:
        await report(request)
        (known,) = (each for each in request.outcomes if each.lease_id == "lease-0")
        refusal = pb.FinishRolloutsResponse.Refusal(
            trajectory_id=known.trajectory_id, error="not in the queue"
        )
        return pb.FinishRolloutsResponse(refused=[refusal])

    scheduler.FinishRollouts = finish  # type: ignore[method-assign]
    with capture_logs() as logged:
        async with working(scheduler, work):
            await work.began.get()
            await work.began.get()
            work.go.set()
            await scheduler.until_reported(2)
    refused = [line for line in logged if line["event"] == "result_refused"]
    assert [line["error"] for line in refused] == ["not in the queue"]
