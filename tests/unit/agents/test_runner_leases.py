"""The runner's side of a lease: bounded work, renewal, loss, drain.

The scheduler is a fake that leases given rollouts and records the reports.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client import REGISTRY
from structlog.testing import capture_logs

from forge.agents import lease_renewal
from forge.agents import runner as runner_module
from forge.agents.rollout import RolloutResult
from forge.core.errors import Unauthenticated, Unavailable
from forge.v1 import scheduler_pb2 as pb
from tests.support.agents.scheduler_stand_in import StandIn, Work, a_runner, working
from tests.support.agents.tasks import lease
from tests.support.runtime.waiting import until, until_blocking

HELD_UP_S = 30.0
"""Longest that a test blocks the event loop: until it fails."""


def blocking(condition: Callable[[], bool]) -> Callable[[pb.RolloutLease], Any]:
    """Work that holds the event loop until something is so."""

    async def block(claim: pb.RolloutLease) -> RolloutResult:
        until_blocking(condition, limit_s=HELD_UP_S)
        return RolloutResult(lease_id=claim.lease_id, trajectory_id=claim.trajectory_id)

    return block


def drain_shown() -> bool:
    """The metric."""
    return bool(REGISTRY.get_sample_value("forge_draining"))


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "PAUSE_S", 0.0)
    monkeypatch.setattr(lease_renewal, "PAUSE_S", 0.0)


async def test_runner_leases_no_more_rollouts_than_allowed() -> None:
    """It requests as many as it has room for, and more only as rollouts end."""
    scheduler, work = StandIn(*(lease(i) for i in range(7))), Work()
    async with working(scheduler, work, concurrency=3):
        for _ in range(3):
            await work.began.get()
        assert scheduler.asked == [3]
        work.go.set()
        await scheduler.until_reported(7)
    assert work.most == 3
    assert set(scheduler.outcomes) == {f"lease-{i}" for i in range(7)}
    assert not any(outcome.error for outcome in scheduler.outcomes.values())


async def test_leases_of_running_rollouts_are_renewed() -> None:
    """Well before they expire."""
    scheduler, work = StandIn(lease(0, lease_s=0.03), lease(1, lease_s=0.03)), Work()
    async with working(scheduler, work):
        assert sorted(await scheduler.renewed.get()) == ["lease-0", "lease-1"]
        assert sorted(await scheduler.renewed.get()) == ["lease-0", "lease-1"]


async def test_new_leader_gets_renewals_at_once() -> None:
    """Long before they are due, and again until one is answered."""
    scheduler, work = StandIn(lease(0, lease_s=3600.0)), Work()
    scheduler.refusals["RenewRollouts"] = [Unavailable("stands by"), Unavailable("stands by")]
    async with working(scheduler, work) as runner:
        await work.began.get()
        runner.renew_now()
        assert await scheduler.renewed.get() == ["lease-0"]
    assert not scheduler.refusals["RenewRollouts"]


async def test_claims_are_renewed_while_an_agent_blocks_the_event_loop() -> None:
    """An agent that computes, or waits without yielding, loses no lease of any rollout."""
    scheduler = StandIn(lease(0, lease_s=0.03))
    async with working(scheduler, blocking(lambda: scheduler.renewals >= 3)):
        await scheduler.until_reported(1)
    assert scheduler.outcomes["lease-0"].error == ""


async def test_claims_expire_if_the_event_loop_stays_blocked() -> None:
    """A hung runner must not keep its rollouts as long as the scheduler allows; once it runs again,
    it renews again."""
    scheduler, work = StandIn(lease(0, lease_s=0.03), lease(1, lease_s=0.03)), Work()
    with capture_logs() as logged:

        def given_up() -> bool:
            return any(line.get("leases_given_up") for line in logged)

        async def block_first(claim: pb.RolloutLease) -> RolloutResult:
            await (blocking(given_up) if claim.lease_id == "lease-0" else work)(claim)
            return RolloutResult(lease_id=claim.lease_id, trajectory_id=claim.trajectory_id)

        async with working(scheduler, block_first, patience_s=0.0):
            await scheduler.until_reported(1)
            while not scheduler.renewed.empty():
                scheduler.renewed.get_nowait()
            assert "lease-1" in await scheduler.renewed.get()
    assert given_up()


async def test_lost_claim_stops_only_its_own_rollout() -> None:
    """The scheduler has leased it to another runner: this one reports nothing."""
    scheduler, work = StandIn(lease(0, lease_s=0.03), lease(1, lease_s=0.03)), Work()
    scheduler.lost = ["lease-0"]
    with capture_logs() as logged:
        async with working(scheduler, work):
            await scheduler.renewed.get()
            await scheduler.renewed.get()
            assert work.cancelled == {"lease-0"}
            assert work.running == {"lease-1"}
            work.go.set()
            await scheduler.until_reported(1)
    assert set(scheduler.outcomes) == {"lease-1"}
    errors = [line["error"] for line in logged if line["event"] == "rollout_failed"]
    assert errors == ["its lease was lost"]


async def test_failed_lease_request_is_repeated() -> None:
    """A request that fails is made again."""
    scheduler, work = StandIn(lease(0)), Work()
    scheduler.refusals["LeaseRollouts"] = [Unavailable("no leader")] * 3
    work.go.set()
    async with working(scheduler, work):
        await scheduler.until_reported(1)


async def test_runner_with_a_wrong_key_ends() -> None:
    """A runner that may not lease ends with the error."""
    scheduler = StandIn()
    scheduler.refusals["LeaseRollouts"] = [Unauthenticated("not signed by this cluster's key")]
    runner = a_runner(scheduler, Work())
    with pytest.raises(ExceptionGroup) as caught:
        await runner.run()
    assert caught.group_contains(Unauthenticated)


async def test_drain_finishes_running_rollouts() -> None:
    """A stopped runner leases no more."""
    scheduler, work = StandIn(lease(0)), Work()
    runner = a_runner(scheduler, work)
    running = asyncio.create_task(runner.run())
    await work.began.get()
    draining = asyncio.create_task(runner.drain(patience_s=60.0))
    scheduler.waiting.append(lease(1))
    work.go.set()
    await draining
    await running
    assert list(scheduler.outcomes) == ["lease-0"]
    assert scheduler.outcomes["lease-0"].error == ""


async def test_drained_runner_keeps_asking() -> None:
    """The scheduler leases it nothing, and says so: running rollouts end, and the metric shows the
    drain until a call is answered without it."""
    scheduler, work = StandIn(lease(0)), Work()
    async with working(scheduler, work, concurrency=2):
        await work.began.get()
        scheduler.drain(True)
        await until(drain_shown)
        work.go.set()
        await scheduler.until_reported(1)
        scheduler.waiting.append(lease(1))
        scheduler.drain(False)
        await scheduler.until_reported(2)
        assert not drain_shown()
    assert set(scheduler.outcomes) == {"lease-0", "lease-1"}


async def test_rollout_leased_during_the_stop_is_run() -> None:
    """The response to a waiting call may be under way: its lease is not lost."""
    scheduler, work = StandIn(), Work()
    work.go.set()
    runner = a_runner(scheduler, work)
    running = asyncio.create_task(runner.run())
    await until(lambda: scheduler.asked)
    scheduler.waiting.append(lease(0))
    await runner.drain(patience_s=60.0)
    await running
    assert list(scheduler.outcomes) == ["lease-0"]
    assert scheduler.outcomes["lease-0"].error == ""


async def test_runner_stops_without_a_scheduler() -> None:
    """An unreachable scheduler does not prevent the stop."""
    scheduler, work = StandIn(), Work()
    runner = a_runner(scheduler, work)
    running = asyncio.create_task(runner.run())
    await until(lambda: scheduler.asked)
    scheduler.refusals["LeaseRollouts"] = [Unavailable("away")]
    await runner.drain(patience_s=60.0)
    await running
    assert scheduler.outcomes == {}


async def test_rollout_longer_than_the_drain_is_stopped_and_reported() -> None:
    """Another runner can attempt it at once, not after the expiry of the lease."""
    scheduler, work = StandIn(lease(0)), Work()
    async with working(scheduler, work):
        await work.began.get()
    assert work.cancelled == {"lease-0"}
    assert scheduler.outcomes["lease-0"].error == "the runner was stopped"
    assert scheduler.outcomes["lease-0"].kind == pb.FAILURE_KIND_INFRASTRUCTURE
    assert not scheduler.outcomes["lease-0"].permanent


async def test_rollout_stopped_before_its_first_step_is_reported() -> None:
    """Even an immediate stop leaves no lease behind."""
    scheduler, work = StandIn(lease(0)), Work()
    runner = a_runner(scheduler, work)
    running = asyncio.create_task(runner.run())
    await until(lambda: runner._leased)
    await runner.drain(patience_s=0.0)
    await running
    assert scheduler.outcomes["lease-0"].error == "the runner was stopped"


async def test_repeated_lease_starts_one_rollout() -> None:
    """A scheduler that repeats itself starts nothing twice."""
    scheduler, work = StandIn(lease(0), lease(0), lease(1)), Work()
    async with working(scheduler, work):
        await work.began.get()
        await work.began.get()
        assert work.running == {"lease-0", "lease-1"}
        work.go.set()
        await scheduler.until_reported(2)
