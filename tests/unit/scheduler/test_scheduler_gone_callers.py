"""Runners that leave while their call waits for rollouts."""

from __future__ import annotations

import asyncio

import pytest

from forge.runtime.coordination import Coordinator, Discovery
from forge.runtime.security.tokens import Keyring
from forge.v1 import common_pb2, scheduler_pb2
from services.scheduler import service
from services.scheduler.config import SchedulerConfig
from services.scheduler.service import SchedulerServicer
from tests.support.runtime.unused import unused
from tests.support.scheduler.cluster import make_task
from tests.support.scheduler.term import TermActors
from tests.support.scheduler.term_calls import lease, status, submit

KEYRING = Keyring((bytes(32),))
REQUEST = scheduler_pb2.LeaseRolloutsRequest(runner_id="gone", max_rollouts=1, wait_s=600.0)


@pytest.fixture
def servicer(term: TermActors) -> SchedulerServicer:
    config = SchedulerConfig(etcd="etcd:2379", max_wait_s=600.0)
    serving = SchedulerServicer(config, KEYRING, unused(Discovery), unused(Coordinator))
    serving.leader = term.leader()
    return serving


async def left(call: asyncio.Task[scheduler_pb2.LeaseRolloutsResponse]) -> None:
    with pytest.raises(asyncio.CancelledError):
        await call


def leave_during_the_grant(
    monkeypatch: pytest.MonkeyPatch, call: asyncio.Task[scheduler_pb2.LeaseRolloutsResponse]
) -> None:
    """Cancels the call in the turn of the event loop in which its answer is made."""

    def cancelling(task: common_pb2.Task, config: SchedulerConfig) -> int:
        call.cancel()
        return task.ByteSize()

    monkeypatch.setattr(service, "lease_bytes", cancelling)


async def test_rollout_granted_to_a_caller_that_left_is_ready_again(
    term: TermActors, servicer: SchedulerServicer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next runner gets it, as the same attempt, and not when the lease ends."""
    await submit(term, make_task("a"))
    call = asyncio.create_task(servicer.LeaseRollouts(REQUEST, None))
    leave_during_the_grant(monkeypatch, call)
    await left(call)
    assert await lease(term) == ["a:0:0"]
    counts = await status(term)
    assert (counts.running_rollouts, counts.retries) == (1, 0)


@pytest.mark.parametrize("turns", range(6))
async def test_call_that_ends_while_it_enters_the_queue_gets_no_rollout(
    term: TermActors, servicer: SchedulerServicer, turns: int
) -> None:
    """In whichever turn of the event loop: before the queue reads its message, or as it answers."""
    call = asyncio.create_task(servicer.LeaseRollouts(REQUEST, None))
    for _ in range(turns):
        await asyncio.sleep(0)
    call.cancel()
    await left(call)
    await submit(term, make_task("a"))
    assert await lease(term) == ["a:0:0"]
