"""Failures of the infrastructure: they cost time, and never an attempt of the task's own."""

from __future__ import annotations

import pytest

from forge.core.queue.admission import PartialGroups, QueueSettings
from forge.core.queue.failures import FailureKind, abandon_reason, kind_of_abandoned
from forge.core.queue.generation_queue import GenerationQueue
from forge.core.queue.groups import Attempt, AttemptState, Group, GroupSpec, Phase, RolloutPhase
from forge.core.trajectory import TaskId

INFRASTRUCTURE = FailureKind.INFRASTRUCTURE


def make_queue(*, term: int = 0, **settings: object) -> GenerationQueue:
    defaults: dict[str, object] = {
        "concurrency": 4,
        "window": 8,
        "rollout_lease_s": 10.0,
        "rollout_timeout_s": 1000.0,
        "max_attempts": 2,
        "retry_backoff_s": 0.0,
    }
    return GenerationQueue(QueueSettings(**(defaults | settings)), term=term)


def add(queue: GenerationQueue, name: str, index: int, *, size: int = 1) -> Group:
    spec = GroupSpec(task_id=TaskId(name), index=index, domain="code", shard="s0", size=size)
    group = Group(spec)
    queue.add_group(group, now_s=0.0)
    return group


def lease(queue: GenerationQueue, *, now_s: float = 0.0, runner_id: str = "r") -> list[str]:
    claims = queue.rollouts.lease(runner_id=runner_id, max_rollouts=100, now_s=now_s)
    return [claim.trajectory_id for claim in claims]


def fail(
    queue: GenerationQueue, trajectory_id: str, kind: FailureKind, *, now_s: float = 0.0
) -> bool:
    return queue.rollouts.fail(
        trajectory_id, reason="died", permanent=False, kind=kind, now_s=now_s
    )


def expire(queue: GenerationQueue, now_s: float) -> list[str]:
    """The claims that ended, each found not to be sealed."""
    expired = queue.expire(now_s)
    return [each for each in expired if queue.rollouts.lapse(each, now_s=now_s)]


def test_restarted_runners_tombstone_no_half_sealed_group() -> None:
    """A runner that dies again and again costs its rollouts nothing but time."""
    queue = make_queue()
    group = add(queue, "a", 0, size=8)
    *sealed, _ = lease(queue)
    for trajectory_id in sealed:
        queue.rollouts.complete(trajectory_id)
    now_s = 0.0
    for _ in range(10):
        now_s += 20.0
        assert len(expire(queue, now_s)) == 1
        assert len(lease(queue, now_s=now_s)) == 1
    assert (group.phase, group.sealed) == (Phase.RUNNING, 7)
    assert group.rollout(7).failures == 0


@pytest.mark.parametrize("partial", PartialGroups)
def test_reported_fault_of_the_infrastructure_counts_for_nothing(partial: PartialGroups) -> None:
    """Whatever `partial_groups` says of failures, it says of the task's own."""
    queue = make_queue(partial_groups=partial)
    group = add(queue, "a", 0)
    now_s = 0.0
    for _ in range(10):
        (trajectory_id,) = lease(queue, now_s=now_s)
        assert fail(queue, trajectory_id, INFRASTRUCTURE, now_s=now_s)
        now_s += 100.0
    assert group.phase is Phase.RUNNING


def test_failures_of_the_task_count_between_faults() -> None:
    """Two failures of its own end a task with two attempts, whatever came between."""
    queue = make_queue()
    group = add(queue, "a", 0)
    for kind in (INFRASTRUCTURE, FailureKind.TASK, INFRASTRUCTURE):
        fail(queue, lease(queue, now_s=1.0)[0], kind)
        assert group.phase is Phase.RUNNING
    fail(queue, lease(queue, now_s=1.0)[0], FailureKind.TASK)
    assert (group.phase, group.reason) == (Phase.TOMBSTONED, "rollout 0: died")


def test_back_off_grows_with_reported_faults() -> None:
    """A cluster that refuses rollouts is not asked for the next one at once, again and again."""
    queue = make_queue(retry_backoff_s=1.0, max_backoff_s=60.0)
    add(queue, "a", 0)
    now_s = 0.0
    for pause_s in (1.0, 2.0, 4.0, 8.0):
        fail(queue, lease(queue, now_s=now_s)[0], INFRASTRUCTURE, now_s=now_s)
        assert lease(queue, now_s=now_s + pause_s - 0.1) == []
        now_s += pause_s


def test_task_that_kills_its_runners_ends_while_others_succeed() -> None:
    """A rollout lost `max_losses` times, while others were sealed, is the fault of its task."""
    queue = make_queue(max_losses=3)
    group = add(queue, "bomb", 0)
    now_s = 0.0
    for index in range(1, 4):
        add(queue, f"good{index}", index)
        bomb, good = lease(queue, now_s=now_s)
        assert (bomb.partition(":")[0], group.phase) == ("bomb", Phase.RUNNING)
        queue.rollouts.complete(good)
        now_s += 20.0
        assert expire(queue, now_s) == [bomb]
    assert group.phase is Phase.TOMBSTONED
    assert "3 times while other rollouts were sealed (max_losses = 3)" in group.reason


@pytest.mark.parametrize("word", ["renewal", "late renewal", "report"])
def test_runner_that_is_often_late_blames_no_task(word: str) -> None:
    """An overloaded host stops a runner again and again. The runner speaks of its claim in the end,
    so the task did not end it, whether another runner has the rollout by now or not."""
    queue = make_queue(max_losses=3, rollout_timeout_s=1e6, concurrency=32, window=32)
    group = add(queue, "slow", 0)
    now_s = 0.0
    (late,) = lease(queue)
    for index in range(1, 9):
        add(queue, f"good{index}", index)
        (good,) = lease(queue, now_s=now_s)
        queue.rollouts.complete(good)
        now_s += 200.0  # longer than the longest lease of a slow runner
        assert expire(queue, now_s) == [late]
        if word == "renewal":
            assert queue.rollouts.renew(late, now_s=now_s)
            continue
        (newer,) = lease(queue, now_s=now_s)
        if word == "report":
            assert not fail(queue, late, FailureKind.TASK, now_s=now_s)
        else:
            assert not queue.rollouts.renew(late, now_s=now_s)
        late = newer
    assert group.phase is Phase.RUNNING


def test_losses_that_no_runner_speaks_of_are_counted_among_others() -> None:
    """A word of one claim takes back the loss of that claim alone, and once."""
    queue = make_queue(max_losses=2)
    group = add(queue, "bomb", 0)
    (first,) = lease(queue)
    add(queue, "good1", 1)
    queue.rollouts.complete(*lease(queue))
    assert expire(queue, 20.0) == [first]
    (second,) = lease(queue, now_s=20.0)
    for _ in range(3):
        assert not queue.rollouts.renew(first, now_s=21.0)
    for index, attempt in ((2, second), (3, None)):
        add(queue, f"good{index}", index)
        claims = lease(queue, now_s=20.0 * index)
        queue.rollouts.complete(claims[-1])
        assert group.phase is Phase.RUNNING
        assert expire(queue, 20.0 * index + 20.0) == [attempt or claims[0]]
    assert group.phase is Phase.TOMBSTONED


def test_losses_in_an_outage_of_everything_count_for_nothing() -> None:
    """Where nothing is sealed, nothing says that the task is to blame."""
    queue = make_queue(max_losses=1)
    group = add(queue, "a", 0)
    for turn in range(5):
        lease(queue, now_s=20.0 * turn)
        expire(queue, 20.0 * turn + 20.0)
    assert group.phase is Phase.RUNNING


def test_claim_renewed_while_the_pool_was_asked_is_kept() -> None:
    """A runner that talks is alive, however late."""
    queue = make_queue()
    add(queue, "a", 0)
    (trajectory_id,) = lease(queue)
    assert queue.expire(10.0) == (trajectory_id,)
    assert queue.rollouts.renew(trajectory_id, now_s=11.0)
    assert not queue.rollouts.lapse(trajectory_id, now_s=11.5)
    assert len(queue.rollouts) == 1


@pytest.mark.parametrize("pause_s", [0.0, 30.0])
def test_late_renewal_takes_back_a_rollout_that_nobody_else_got(pause_s: float) -> None:
    """Whether it waits for its back-off or for a runner."""
    queue = make_queue(retry_backoff_s=30.0, max_losses=9)
    add(queue, "a", 0)
    (trajectory_id,) = lease(queue)
    assert expire(queue, 10.0) == [trajectory_id]
    queue.rollouts.lease(runner_id="r", max_rollouts=0, now_s=10.0 + pause_s)
    assert queue.rollouts.renew(trajectory_id, now_s=12.0 + pause_s)
    assert lease(queue, now_s=100.0) == []
    assert queue.rollouts.complete(trajectory_id)


def test_late_renewal_takes_no_rollout_from_another_runner() -> None:
    """The one that has it goes on; the late one is called off."""
    queue = make_queue()
    add(queue, "a", 0)
    (late,) = lease(queue)
    expire(queue, 10.0)
    (newer,) = lease(queue, now_s=10.0)
    assert not queue.rollouts.renew(late, now_s=11.0)
    assert queue.rollouts.renew(newer, now_s=11.0)


def test_taken_back_claim_keeps_its_deadline() -> None:
    """A rollout that never ends cannot live on by being late."""
    queue = make_queue(rollout_timeout_s=25.0, retry_backoff_s=100.0)
    group = add(queue, "a", 0)
    (trajectory_id,) = lease(queue)
    expire(queue, 10.0)
    assert queue.rollouts.renew(trajectory_id, now_s=20.0)
    assert expire(queue, 25.0) == [trajectory_id]
    assert group.rollout(0).failures == 1, "too long a life is the task's own"
    assert not queue.rollouts.renew(trajectory_id, now_s=26.0)


def test_claims_of_a_slow_runner_last_longer() -> None:
    """A runner whose renewals come late gets three times the pause between them; others do not."""
    queue = make_queue(rollout_lease_s=10.0)
    add(queue, "a", 0)
    (slow,) = lease(queue, runner_id="slow")
    assert queue.rollouts.renew(slow, now_s=9.0)
    add(queue, "b", 1)
    (quick,) = lease(queue, runner_id="quick", now_s=9.0)
    assert queue.expire(35.9) == (quick,)
    assert queue.rollouts.renew(slow, now_s=45.0)
    assert slow not in queue.expire(144.9), "but no more than ten times the lease"
    assert slow in queue.expire(145.0)


def test_slowness_of_a_runner_is_forgotten() -> None:
    """Once its renewals have been in time for long, its claims end as soon as those of others."""
    queue = make_queue(rollout_lease_s=10.0)
    add(queue, "a", 0)
    (trajectory_id,) = lease(queue)
    queue.rollouts.renew(trajectory_id, now_s=9.0)
    for second in range(10, 250):
        queue.rollouts.renew(trajectory_id, now_s=float(second))
    assert queue.expire(259.0) == (trajectory_id,)


def test_abandoned_for_the_infrastructure_counts_under_the_next_leader_for_nothing() -> None:
    """The reason on record says whose failure it was."""
    queue = make_queue(term=1, max_attempts=1)
    spec = GroupSpec(task_id=TaskId("a"), index=0, domain="code", shard="s0", size=1)
    group = Group(spec)
    group.recall(Attempt(0, attempt, AttemptState.LOST) for attempt in range(5))
    queue.add_group(group, now_s=0.0)
    assert group.rollout(0).failures == 0
    assert lease(queue) == ["a:0:1000"]
    assert group.rollout(0).phase is RolloutPhase.LEASED


def test_abandon_reason_tells_the_kind() -> None:
    """What a runner writes into the pool is what the next leader reads."""
    for kind in FailureKind:
        assert kind_of_abandoned(abandon_reason(kind, "no router is there")) is kind
    assert kind_of_abandoned("the rollout was stopped") is FailureKind.TASK
