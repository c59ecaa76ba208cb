"""Settings of an operator, and skipped groups, in one leader's term."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial

import pytest

from forge.core.errors import NotFound, ResourceExhausted
from forge.core.queue.activity import Activity
from forge.core.queue.groups import SAME_OUTCOME
from forge.v1 import scheduler_pb2
from services.scheduler.state import draining_runners
from services.scheduler.state.draining_runners import SetRunnerDraining, changed_drains
from services.scheduler.state.messages.batches import TakeBatch
from services.scheduler.state.messages.rollouts import (
    AttemptReport,
    LeaseRollouts,
    RenewRollouts,
    SettleRollouts,
)
from services.scheduler.state.messages.term import SetActivity, Tick
from tests.support.scheduler.cluster import make_task
from tests.support.scheduler.term import ASK_S, Clock, FakeShards, TermActors
from tests.support.scheduler.term_calls import status, submit


@pytest.fixture
async def skipping(shards: FakeShards, clock: Clock) -> AsyncIterator[TermActors]:
    """A term that skips groups whose rollouts have one outcome."""
    actors = TermActors(shards, clock, skip_equal_rewards=True)
    await actors.start()
    yield actors
    await actors.system.stop()


async def sample(term: TermActors, *rewards: float) -> None:
    """Lease as many rollouts, and seal each with its reward."""
    ask = LeaseRollouts(runner_id="r", max_rollouts=len(rewards))
    grants = await (await term.queue.ask(ask, timeout_s=ASK_S))
    ids = [grant.trajectory_id for grant in grants]
    for trajectory_id, reward in zip(ids, rewards, strict=True):
        term.shards.seal(trajectory_id, reward=reward)
    reports = [AttemptReport(trajectory_id=i, summary=term.shards.stored[i]) for i in ids]
    await term.queue.ask(SettleRollouts(reports=reports), timeout_s=ASK_S)


async def test_pause_is_recorded_before_it_takes_effect(term: TermActors) -> None:
    """The next leader keeps it; waiting runners are served after the resume."""
    await term.commits.ask(SetActivity(activity=Activity.PAUSED), timeout_s=ASK_S)
    assert term.record.fields == {"activity": Activity.PAUSED}
    assert (await status(term)).activity == scheduler_pb2.ACTIVITY_PAUSED
    ask = LeaseRollouts(runner_id="r", max_rollouts=1)
    waiting = await term.queue.ask(ask, timeout_s=ASK_S)
    await submit(term, make_task("a"))
    assert not waiting.done()
    await term.commits.ask(SetActivity(activity=Activity.RUNNING), timeout_s=ASK_S)
    (grant,) = waiting.result()
    assert grant.trajectory_id == "a:0:0"


async def test_flat_group_is_skipped(skipping: TermActors, shards: FakeShards) -> None:
    """All its rollouts have the same score: it is tombstoned with that reason, counted, and in no
    batch."""
    await submit(skipping, make_task("same", size=2), make_task("differs", size=2))
    await sample(skipping, 1.0, 1.0, 1.0, 0.0)
    found = await status(skipping)
    assert (found.skipped, found.tombstoned, found.pending) == (1, 1, 1)
    take = TakeBatch(trainer_id="t", max_groups=1)
    view = await (await skipping.queue.ask(take, timeout_s=ASK_S))
    assert [group.record.task.task_id for group in view.groups] == ["differs"]
    (change,) = [one for changes in shards.changes.values() for one in changes]
    assert (change.task_id, change.reason) == ("same", SAME_OUTCOME)


async def test_group_of_one_rollout_is_never_skipped(skipping: TermActors) -> None:
    """A single rollout equals itself; an evaluation is not skipped either."""
    await submit(skipping, make_task("one"), make_task("held-out", size=2, evaluation=True))
    await sample(skipping, 1.0, 1.0, 1.0)
    found = await status(skipping)
    assert (found.skipped, found.tombstoned, found.eval_pending) == (0, 0, 0)


async def test_flat_groups_are_trained_by_default(term: TermActors) -> None:
    """The setting is off by default."""
    await submit(term, make_task("same", size=2))
    await sample(term, 1.0, 1.0)
    assert (await status(term)).skipped == 0


async def test_trajectory_sealed_too_late_is_counted(term: TermActors) -> None:
    """After the tombstone of its group it changes no state, and is no error."""
    await submit(term, make_task("a", size=2))
    ask = LeaseRollouts(runner_id="r", max_rollouts=2)
    first, second = await (await term.queue.ask(ask, timeout_s=ASK_S))
    gone = AttemptReport(trajectory_id=first.trajectory_id, error="bad", permanent=True)
    await term.queue.ask(SettleRollouts(reports=[gone]), timeout_s=ASK_S)
    term.shards.seal(second.trajectory_id)
    late = AttemptReport(
        trajectory_id=second.trajectory_id, summary=term.shards.stored[second.trajectory_id]
    )
    await term.queue.ask(SettleRollouts(reports=[late]), timeout_s=ASK_S)
    found = await status(term)
    assert (found.surplus, found.tombstoned, found.pending) == (1, 1, 0)


async def test_backward_clock_jump_ends_no_claim(term: TermActors, clock: Clock) -> None:
    """The clock is monotonic; if it were not, claims would last longer."""
    await submit(term, make_task("a"))
    clock.now_s = 5.0
    ask = LeaseRollouts(runner_id="r", max_rollouts=1)
    (grant,) = await (await term.queue.ask(ask, timeout_s=ASK_S))
    clock.now_s = -1000.0
    await term.queue.ask(Tick(), timeout_s=ASK_S)
    renew = RenewRollouts(lease_ids=[grant.trajectory_id])
    assert await term.queue.ask(renew, timeout_s=ASK_S) == ()


def drain(runner_id: str, draining: bool = True, **live: str) -> SetRunnerDraining:
    """`live`: start ids of the runners in discovery."""
    return SetRunnerDraining(runner_id=runner_id, draining=draining, live=live)


async def test_drained_runner_gets_no_lease(term: TermActors) -> None:
    """Its waiting call is answered, another runner of the same abilities is served, and its leases
    continue. A resume answers the next waiting call, so the runner asks again."""
    ask = partial(LeaseRollouts, runner_id="r", max_rollouts=1, start_id="1")
    await submit(term, make_task("a"))
    (grant,) = await (await term.queue.ask(ask(), timeout_s=ASK_S))
    waiting = await term.queue.ask(ask(), timeout_s=ASK_S)
    assert await term.commits.ask(drain("r", r="1", s="1"), timeout_s=ASK_S) == 1
    assert term.record.fields == {"draining_runners": {"r": "1"}}
    assert waiting.result() == ()
    drained = await term.queue.ask(ask(), timeout_s=ASK_S)
    other = await term.queue.ask(LeaseRollouts(runner_id="s", max_rollouts=1), timeout_s=ASK_S)
    await submit(term, make_task("b"))
    assert [one.trajectory_id for one in other.result()] == ["b:0:0"] and not drained.done()
    renew = RenewRollouts(lease_ids=[grant.trajectory_id], runner_id="r")
    assert await term.queue.ask(renew, timeout_s=ASK_S) == ()
    (shown,) = (await status(term)).draining_runners
    assert (shown.runner_id, shown.start_id, shown.running) == ("r", "1", 1)
    await submit(term, make_task("c"))
    assert await term.commits.ask(drain("r", False), timeout_s=ASK_S) == 1
    assert drained.result() == () and term.record.fields == {"draining_runners": {}}
    (grant,) = await (await term.queue.ask(ask(), timeout_s=ASK_S))
    assert grant.trajectory_id == "c:0:0"


async def test_restart_of_a_runner_ends_its_drain(term: TermActors) -> None:
    """As of every other process: the new one has another start id."""
    await submit(term, make_task("a"))
    await term.commits.ask(drain("r", r="1"), timeout_s=ASK_S)
    ask = LeaseRollouts(runner_id="r", max_rollouts=1, start_id="2")
    assert len(await (await term.queue.ask(ask, timeout_s=ASK_S))) == 1


async def test_status_names_the_stall_of_drained_runners(term: TermActors, clock: Clock) -> None:
    """One was drained while its call waited; a runner that is not drained ends the stall."""
    await term.queue.ask(LeaseRollouts(runner_id="r", max_rollouts=1), timeout_s=ASK_S)
    await term.commits.ask(drain("r", r=""), timeout_s=ASK_S)
    await submit(term, make_task("a"))
    clock.now_s = 121.0
    for runner_id in ("r", "s"):
        ask = LeaseRollouts(runner_id=runner_id, max_rollouts=1)
        await term.commits.ask(drain(runner_id, r="", s=""), timeout_s=ASK_S)
        await term.queue.ask(ask, timeout_s=ASK_S)
    stall = (await status(term)).stall
    assert stall.cause == "runners_drained" and ": r, s." in stall.text
    await term.commits.ask(drain("s", False, r="", s=""), timeout_s=ASK_S)
    await term.queue.ask(LeaseRollouts(runner_id="s", max_rollouts=1), timeout_s=ASK_S)
    assert (await status(term)).stall.cause != "runners_drained"


def test_drains_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of restarted runners go with the next change, those of absent ones only for room."""
    monkeypatch.setattr(draining_runners, "MOST_DRAINED", 2)
    stored = {"old": "1", "away": "1"}
    assert changed_drains(stored, drain("new", old="2", new="1")) == {"away": "1", "new": "1"}
    assert changed_drains(stored, drain("new", old="1", new="1")) == {"old": "1", "new": "1"}
    with pytest.raises(ResourceExhausted, match="2 runners are drained"):
        changed_drains(stored, drain("new", old="1", away="1", new="1"))
    with pytest.raises(NotFound, match="runner gone"):
        changed_drains(stored, drain("gone", old="1"))
    assert changed_drains(stored, drain("away", False)) == {"old": "1"}
