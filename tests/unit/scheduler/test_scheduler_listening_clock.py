"""A machine's clock that is set while a scheduler leads."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from forge.core.errors import Unauthenticated
from forge.runtime.coordination import Coordinator, Discovery
from forge.runtime.security.tokens import Keyring
from forge.v1 import scheduler_pb2
from services.scheduler.config import SchedulerConfig
from services.scheduler.service import SchedulerServicer
from services.scheduler.state.messages.groups import Submit
from services.scheduler.state.messages.rollouts import LeaseRollouts
from services.scheduler.state.messages.term import GetStatus, Tick
from tests.support.runtime.unused import unused
from tests.support.scheduler.cluster import make_task
from tests.support.scheduler.term import ASK_S, Clock, TermActors

NOON_S = 1.8e9
DAY_S = 86_400.0


@pytest.mark.parametrize("jump_s", [DAY_S, -DAY_S])
async def test_set_clock_ends_no_claim_and_dates_later_tokens(
    term: TermActors,
    clock: Clock,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    jump_s: float,
) -> None:
    """Claims follow the monotonic clock; a session's token follows the wall clock of its lease, so
    a gateway whose clock is beyond its end refuses it."""
    keyring = Keyring.generate(tmp_path / "key")
    servicer = SchedulerServicer(
        SchedulerConfig(etcd="etcd:2379"), keyring, unused(Discovery), unused(Coordinator)
    )
    servicer.leader = term.leader()
    await term.submissions.ask(Submit(tasks={n: make_task(n) for n in "ab"}), timeout_s=ASK_S)
    request = scheduler_pb2.LeaseRolloutsRequest(runner_id="r", max_rollouts=1)
    monkeypatch.setattr(time, "time", lambda: NOON_S)
    (before,) = (await servicer.LeaseRollouts(request, None)).leases
    monkeypatch.setattr(time, "time", lambda: NOON_S + jump_s)
    clock.now_s += 1.0
    await term.queue.ask(Tick(), timeout_s=ASK_S)
    renew = scheduler_pb2.RenewRolloutsRequest(lease_ids=[before.lease_id])
    assert not (await servicer.RenewRollouts(renew, None)).lost
    (after,) = (await servicer.LeaseRollouts(request, None)).leases
    ttl_s = SchedulerConfig().session_ttl_s
    for lease, ends_s in ((before, NOON_S + ttl_s), (after, NOON_S + jump_s + ttl_s)):
        keyring.verify(lease.session_token, now_s=ends_s - 1)
        with pytest.raises(Unauthenticated, match="expired"):
            keyring.verify(lease.session_token, now_s=ends_s + 1)


async def test_pause_of_the_scheduler_ends_no_claim(term: TermActors, clock: Clock) -> None:
    """While its process was stopped no runner could renew: claims last longer by that time."""
    await term.submissions.ask(Submit(tasks={"a": make_task("a")}), timeout_s=ASK_S)
    ask = LeaseRollouts(runner_id="r", max_rollouts=1)
    (grant,) = await (await term.queue.ask(ask, timeout_s=ASK_S))
    clock.now_s = term.loop_time_s = 60.0
    await term.queue.ask(Tick(), timeout_s=ASK_S)
    status = await term.queue.ask(GetStatus(), timeout_s=ASK_S)
    assert (status.running_rollouts, status.retries) == (1, 0)
    clock.now_s = 71.0
    await term.queue.ask(Tick(), timeout_s=ASK_S)
    while not status.retries:
        status = await term.queue.ask(GetStatus(), timeout_s=ASK_S)
    assert grant.trajectory_id == "a:0:0"
