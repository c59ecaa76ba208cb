"""Why nothing is trained, and what to do: each cause, in the status and in the log."""

from __future__ import annotations

from typing import Any

import pytest
from structlog.testing import capture_logs

from forge.core.queue.activity import Activity
from forge.core.queue.dispatch.failures import FailureKind
from services.scheduler.state.messages.batches import CommitBatch, Rewind, TakeBatch
from services.scheduler.state.messages.groups import DropGroups, Submit
from services.scheduler.state.messages.rollouts import AttemptReport, LeaseRollouts, SettleRollouts
from services.scheduler.state.messages.term import SetAway, Tick
from services.scheduler.state.stalls import Facts, HeadGroup, why
from tests.support.scheduler.cluster import make_task
from tests.support.scheduler.term import ASK_S, Clock, FakeShards, TermActors
from tests.support.scheduler.term_calls import status

AFTER_S = 120.0

CASES: list[tuple[str, dict[str, Any], str]] = [
    ("paused", {"activity": Activity.PAUSED}, "forge queue resume"),
    ("drained", {"activity": Activity.DRAINING, "queued": 7}, "7 groups wait"),
    ("trainer_busy", {"batch": ("t", "batch-0-3", 500.0)}, "trainer t has had batch-0-3 for 500 s"),
    ("no_trainer", {"complete_in_window": 4, "trainer_silent_s": 90.0}, "no trainer has asked"),
    ("shard_away", {"away": frozenset({"s1", "s0"})}, "pool shard s0, s1 does not answer"),
    ("no_runner", {"runner_silent_s": 300.0}, "no runner has called for 300 s"),
    ("runners_drained", {"all_drained": ["r1", "r2"]}, "drains every runner that calls: r1, r2"),
    (
        "given_up",
        {"tombstoned": 9, "tombstone_reason": "rollout 0: ended with 1", "failed": True},
        "most of them with: rollout 0: ended with 1. Check the agent program and the runner's log.",
    ),
    ("faults", {"faults": 5, "fault_reason": "the disk is full"}, "the disk is full"),
    (
        "trainer_failing",
        {"complete_in_window": 8, "returned": 12},
        "trainers took 12 batches since the last step and committed none",
    ),
    (
        "slow_head",
        {
            "complete_in_window": 3,
            "assigned": 3,
            "complete_outside_window": 6,
            "head": HeadGroup(task_id="a", index=17, open_rollouts=2, failures=1),
        },
        "task a (index 17): 2 of its rollouts have not ended, with 1 failures",
    ),
    ("slow_rollouts", {"rollouts": 12, "running": 3}, "12 rollouts of 3 groups run"),
    ("nothing_starts", {"queued": 3}, "3 groups are queued and none is started"),
]


@pytest.mark.parametrize(("cause", "facts", "said"), CASES, ids=[case[0] for case in CASES])
def test_stall_causes_are_named_with_their_remedy(
    cause: str, facts: dict[str, Any], said: str
) -> None:
    """The status line is enough to know where to look next."""
    stall = why(Facts(idle_s=AFTER_S, waiting=10, **facts), after_s=AFTER_S)
    assert stall is not None
    assert stall.cause == cause
    assert said in stall.text


def test_stall_causes_have_an_order() -> None:
    """The dominant cause comes first: the operator's pause before a lack of runners, and that
    before earlier failures."""
    all_facts: dict[str, Any] = {}
    for _, facts, _ in CASES:
        all_facts |= {name: value for name, value in facts.items() if name not in all_facts}
    stall = why(Facts(idle_s=AFTER_S, waiting=10, **all_facts), after_s=AFTER_S)
    assert stall is not None and stall.cause == "paused"


@pytest.mark.parametrize(
    "facts",
    [{"idle_s": AFTER_S - 1, "waiting": 10, "tombstoned": 9}, {"idle_s": 9999.0, "waiting": 0}],
    ids=["progress", "nothing to train on"],
)
def test_progress_or_an_empty_queue_is_no_stall(facts: dict[str, Any]) -> None:
    """A queue at its end is no fault."""
    assert why(Facts(**facts), after_s=AFTER_S) is None


def test_queue_with_only_tombstones_is_a_stall() -> None:
    """No group waits any more, and none was trained."""
    facts = Facts(idle_s=AFTER_S, tombstoned=94, tombstone_reason="died")
    stall = why(facts, after_s=AFTER_S)
    assert stall is not None and stall.cause == "given_up"


def test_long_reasons_are_cut() -> None:
    """A stack trace does not fill the screen."""
    facts = Facts(idle_s=AFTER_S, waiting=1, faults=1, fault_reason="x" * 5000)
    stall = why(facts, after_s=AFTER_S)
    assert stall is not None and len(stall.text) < 600


async def submit_and_lease(term: TermActors, task_id: str) -> str:
    tasks = {task_id: make_task(task_id)}
    await term.submissions.ask(Submit(tasks=tasks), timeout_s=ASK_S)
    ask = LeaseRollouts(runner_id="r", max_rollouts=1)
    (grant,) = await (await term.queue.ask(ask, timeout_s=ASK_S))
    return str(grant.trajectory_id)


async def test_status_shows_a_stall_until_a_batch_is_committed(
    term: TermActors, shards: FakeShards, clock: Clock
) -> None:
    """From a real queue: no runner, then a runner whose attempts are lost, then a step."""
    trajectory_id = await submit_and_lease(term, "a")
    assert not (await status(term)).HasField("stall")
    clock.now_s = 200.0
    found = await status(term)
    assert (found.stall.cause, found.untrained_s) == ("no_runner", 200.0)
    report = AttemptReport(
        trajectory_id=trajectory_id, error="no router", kind=FailureKind.INFRASTRUCTURE
    )
    await term.queue.ask(SettleRollouts(reports=[report]), timeout_s=ASK_S)
    clock.now_s = 202.0
    ask = LeaseRollouts(runner_id="r", max_rollouts=1)
    (again,) = await (await term.queue.ask(ask, timeout_s=ASK_S))
    found = await status(term)
    assert (found.stall.cause, found.faults) == ("faults", 1)
    assert "no router" in found.stall.text
    shards.seal(again.trajectory_id)
    sealed = AttemptReport(
        trajectory_id=again.trajectory_id, summary=shards.stored[again.trajectory_id]
    )
    await term.queue.ask(SettleRollouts(reports=[sealed]), timeout_s=ASK_S)
    take = TakeBatch(trainer_id="t", max_groups=1)
    batch = await (await term.queue.ask(take, timeout_s=ASK_S))
    assert not (await status(term)).HasField("stall")
    clock.now_s += AFTER_S
    assert (await status(term)).stall.cause == "trainer_busy"
    commit = CommitBatch(batch_id=batch.batch_id, step=1, task_ids=["a"])
    await term.commits.ask(commit, timeout_s=ASK_S)
    found = await status(term)
    assert not found.HasField("stall")
    assert found.untrained_s == 0.0


async def test_time_without_tasks_is_no_stall(term: TermActors, clock: Clock) -> None:
    """Services that start for minutes before the first task, and pauses of the submitter between
    tasks, are not reported as time without training."""
    clock.now_s = 195.0
    await submit_and_lease(term, "a")
    found = await status(term)
    assert (found.untrained_s, found.HasField("stall")) == (0.0, False)
    clock.now_s = 400.0
    tasks = {"b": make_task("b")}
    await term.submissions.ask(Submit(tasks=tasks), timeout_s=ASK_S)
    found = await status(term)
    assert (found.untrained_s, found.stall.cause) == (205.0, "no_runner")


async def test_stall_continues_after_a_queue_of_tombstones(term: TermActors, clock: Clock) -> None:
    """Tasks that fail one after the other are a stall, also if each is submitted alone."""
    for task_id in ("a", "b"):
        failed = AttemptReport(
            trajectory_id=await submit_and_lease(term, task_id), error="died", permanent=True
        )
        await term.queue.ask(SettleRollouts(reports=[failed]), timeout_s=ASK_S)
        clock.now_s += 150.0
    assert (await status(term)).untrained_s == 300.0


async def test_dropped_groups_are_no_cause_of_a_stall(term: TermActors, clock: Clock) -> None:
    """An operator or the pool took them: the agent has no fault, and new work begins anew."""
    for task_id in ("a", "b"):
        await submit_and_lease(term, task_id)
    await term.commits.ask(DropGroups(task_ids=("a",), reason="wrong data"), timeout_s=ASK_S)
    clock.now_s += AFTER_S
    assert (await status(term)).stall.cause == "no_runner"
    await term.commits.ask(DropGroups(task_ids=("b",), reason="wrong data"), timeout_s=ASK_S)
    assert not (await status(term)).HasField("stall")
    await submit_and_lease(term, "c")
    assert (await status(term)).untrained_s == 0.0


def test_tombstone_without_a_failed_rollout_does_not_blame_the_agent() -> None:
    """Equal rewards and skipped steps have their own reason."""
    facts = Facts(idle_s=AFTER_S, tombstoned=9, tombstone_reason="step 5 skipped: not finite")
    stall = why(facts, after_s=AFTER_S)
    assert stall is not None
    assert stall.text.endswith("most of them with: step 5 skipped: not finite.")


async def test_stall_is_logged_once_per_cause(term: TermActors, clock: Clock) -> None:
    """A warning each tick would hide other lines."""
    await submit_and_lease(term, "a")
    with capture_logs() as logs:
        for clock.now_s in (200.0, 201.0, 202.0):
            await term.queue.ask(Tick(), timeout_s=ASK_S)
        await term.queue.ask(SetAway(shards=frozenset({"s0"})), timeout_s=ASK_S)
        await term.queue.ask(Tick(), timeout_s=ASK_S)
        clock.now_s = 600.0
        await term.queue.ask(Tick(), timeout_s=ASK_S)
    told = [log["cause"] for log in logs if log["event"] == "training_stalled"]
    assert told == ["no_runner", "shard_away", "shard_away"]


async def test_batches_without_a_commit_are_the_trainers_fault(
    term: TermActors, shards: FakeShards, clock: Clock
) -> None:
    """A trainer that crashes at each batch rewinds and takes the groups again: the queue's limits
    are no cause."""
    trajectory_id = await submit_and_lease(term, "a")
    shards.seal(trajectory_id)
    sealed = AttemptReport(trajectory_id=trajectory_id, summary=shards.stored[trajectory_id])
    await term.queue.ask(SettleRollouts(reports=[sealed]), timeout_s=ASK_S)
    for _ in range(3):
        clock.now_s += AFTER_S / 2
        take = TakeBatch(trainer_id="t", max_groups=1)
        await (await term.queue.ask(take, timeout_s=ASK_S))
        await term.commits.ask(Rewind(step=0), timeout_s=ASK_S)
    ask = LeaseRollouts(runner_id="r", max_rollouts=1)
    assert not (await term.queue.ask(ask, timeout_s=ASK_S)).done()
    found = (await status(term)).stall
    assert found.cause == "trainer_failing"
    assert "trainers took 3 batches since the last step and committed none" in found.text


async def test_trainer_without_a_whole_batch_waits_for_rollouts(
    term: TermActors, shards: FakeShards, clock: Clock
) -> None:
    """A batch was released once, and one of its groups has gone since: no fault."""
    ids = {task_id: await submit_and_lease(term, task_id) for task_id in ("a", "b")}
    for one in ids.values():
        shards.seal(one)
    sealed = [AttemptReport(trajectory_id=one, summary=shards.stored[one]) for one in ids.values()]
    await term.queue.ask(SettleRollouts(reports=sealed), timeout_s=ASK_S)
    take = TakeBatch(trainer_id="t", max_groups=2)
    assert len((await (await term.queue.ask(take, timeout_s=ASK_S))).groups) == 2
    await term.commits.ask(Rewind(step=0), timeout_s=ASK_S)
    await term.commits.ask(DropGroups(task_ids=("b",), reason="wrong data"), timeout_s=ASK_S)
    clock.now_s += AFTER_S
    await submit_and_lease(term, "c")
    again = TakeBatch(trainer_id="t", max_groups=2)
    assert not (await term.queue.ask(again, timeout_s=ASK_S)).done()
    assert (await status(term)).stall.cause == "slow_rollouts"


async def test_trainer_that_released_a_short_batch_waits_for_a_whole_one(
    term: TermActors, shards: FakeShards, clock: Clock
) -> None:
    """The queue had ended, and grows again: the groups of the short batch do not make a whole
    one, and the trainer has no fault."""
    trajectory_id = await submit_and_lease(term, "a")
    shards.seal(trajectory_id)
    sealed = AttemptReport(trajectory_id=trajectory_id, summary=shards.stored[trajectory_id])
    await term.queue.ask(SettleRollouts(reports=[sealed]), timeout_s=ASK_S)
    clock.now_s += AFTER_S
    take = TakeBatch(trainer_id="t", max_groups=2)
    assert len((await (await term.queue.ask(take, timeout_s=ASK_S))).groups) == 1
    await term.commits.ask(Rewind(step=0), timeout_s=ASK_S)
    await submit_and_lease(term, "b")
    again = TakeBatch(trainer_id="t", max_groups=2)
    assert not (await term.queue.ask(again, timeout_s=ASK_S)).done()
    assert (await status(term)).stall.cause == "slow_rollouts"


async def test_trainer_that_fails_while_it_asks_ahead_is_named(
    term: TermActors, shards: FakeShards, clock: Clock
) -> None:
    """It asked for the batch after its own in vain, which says nothing about its own."""
    trajectory_id = await submit_and_lease(term, "a")
    shards.seal(trajectory_id)
    sealed = AttemptReport(trajectory_id=trajectory_id, summary=shards.stored[trajectory_id])
    await term.queue.ask(SettleRollouts(reports=[sealed]), timeout_s=ASK_S)
    clock.now_s += AFTER_S
    await (await term.queue.ask(TakeBatch(trainer_id="t#0", max_groups=1), timeout_s=ASK_S))
    ahead = await term.queue.ask(TakeBatch(trainer_id="t#1", max_groups=1), timeout_s=ASK_S)
    ahead.cancel()
    ask = LeaseRollouts(runner_id="r", max_rollouts=1)
    assert not (await term.queue.ask(ask, timeout_s=ASK_S)).done()
    await term.commits.ask(Rewind(step=0), timeout_s=ASK_S)
    assert (await status(term)).stall.cause == "trainer_failing"
