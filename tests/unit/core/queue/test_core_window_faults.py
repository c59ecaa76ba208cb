"""Failures of the infrastructure: they cost time, and never an attempt of the task's own."""

from __future__ import annotations

from typing import Any

import pytest

from forge.core.queue.admission import PartialGroups, QueueSettings
from forge.core.queue.dispatch.failures import FailureKind, abandon_reason, kind_of_abandoned
from forge.core.queue.generation_queue import GenerationQueue
from forge.core.queue.groups import (
    AttemptState,
    Group,
    GroupSpec,
    Phase,
    RolloutPhase,
    StoredAttempt,
)
from forge.core.trajectory import TaskId

INFRASTRUCTURE = FailureKind.INFRASTRUCTURE


def make_queue(*, term: int = 0, **settings: Any) -> GenerationQueue:
    defaults: dict[str, Any] = {
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


def test_runner_restarts_tombstone_no_group() -> None:
    """A runner that dies repeatedly costs its rollouts only time."""
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
def test_infrastructure_failures_use_up_no_attempt(partial: PartialGroups) -> None:
    """`partial_groups` applies to the task's own failures only."""
    queue = make_queue(partial_groups=partial)
    group = add(queue, "a", 0)
    now_s = 0.0
    for _ in range(10):
        (trajectory_id,) = lease(queue, now_s=now_s)
        assert fail(queue, trajectory_id, INFRASTRUCTURE, now_s=now_s)
        now_s += 100.0
    assert group.phase is Phase.RUNNING


def test_task_failures_count_across_infrastructure_failures() -> None:
    """Two failures of its own end a task with two attempts, with any failures between them."""
    queue = make_queue()
    group = add(queue, "a", 0)
    for kind in (INFRASTRUCTURE, FailureKind.TASK, INFRASTRUCTURE):
        fail(queue, lease(queue, now_s=1.0)[0], kind)
        assert group.phase is Phase.RUNNING
    fail(queue, lease(queue, now_s=1.0)[0], FailureKind.TASK)
    assert (group.phase, group.reason) == (Phase.TOMBSTONED, "rollout 0: died")


def test_back_off_grows_with_infrastructure_failures() -> None:
    """A cluster that refuses rollouts is not asked again at once."""
    queue = make_queue(retry_backoff_s=1.0, max_backoff_s=60.0)
    add(queue, "a", 0)
    now_s = 0.0
    for pause_s in (1.0, 2.0, 4.0, 8.0):
        fail(queue, lease(queue, now_s=now_s)[0], INFRASTRUCTURE, now_s=now_s)
        assert lease(queue, now_s=now_s + pause_s - 0.1) == []
        now_s += pause_s


def test_task_that_kills_its_runners_is_tombstoned() -> None:
    """A rollout lost `max_losses` times, while others were sealed, fails because of its task."""
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
def test_late_runner_does_not_blame_its_task(word: str) -> None:
    """An overloaded host delays a runner repeatedly. The runner renews its claim in the end, so the
    task did not kill it, even if another runner has the rollout by now."""
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


def test_losses_without_a_late_renewal_are_counted() -> None:
    """A renewal withdraws the loss of its own claim only, and once."""
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


def test_losses_in_a_total_outage_do_not_count() -> None:
    """If no rollout is sealed, the task is not to blame."""
    queue = make_queue(max_losses=1)
    group = add(queue, "a", 0)
    for turn in range(5):
        lease(queue, now_s=20.0 * turn)
        expire(queue, 20.0 * turn + 20.0)
    assert group.phase is Phase.RUNNING


def test_claim_renewed_during_its_look_up_is_kept() -> None:
    """A runner that renews is alive, however late."""
    queue = make_queue()
    add(queue, "a", 0)
    (trajectory_id,) = lease(queue)
    assert queue.expire(10.0) == (trajectory_id,)
    assert queue.rollouts.renew(trajectory_id, now_s=11.0)
    assert not queue.rollouts.lapse(trajectory_id, now_s=11.5)
    assert len(queue.rollouts) == 1


@pytest.mark.parametrize("pause_s", [0.0, 30.0])
def test_late_renewal_regains_an_unassigned_rollout(pause_s: float) -> None:
    """Also while the rollout waits for its back-off or for a runner."""
    queue = make_queue(retry_backoff_s=30.0, max_losses=9)
    add(queue, "a", 0)
    (trajectory_id,) = lease(queue)
    assert expire(queue, 10.0) == [trajectory_id]
    queue.rollouts.lease(runner_id="r", max_rollouts=0, now_s=10.0 + pause_s)
    assert queue.rollouts.renew(trajectory_id, now_s=12.0 + pause_s)
    assert lease(queue, now_s=100.0) == []
    assert queue.rollouts.complete(trajectory_id)


def test_late_renewal_does_not_regain_a_reassigned_rollout() -> None:
    """The other runner keeps it; the late runner must stop."""
    queue = make_queue()
    add(queue, "a", 0)
    (late,) = lease(queue)
    expire(queue, 10.0)
    (newer,) = lease(queue, now_s=10.0)
    assert not queue.rollouts.renew(late, now_s=11.0)
    assert queue.rollouts.renew(newer, now_s=11.0)


def test_regained_claim_keeps_its_deadline() -> None:
    """Late renewals cannot extend a rollout without end."""
    queue = make_queue(rollout_timeout_s=25.0, retry_backoff_s=100.0)
    group = add(queue, "a", 0)
    (trajectory_id,) = lease(queue)
    expire(queue, 10.0)
    assert queue.rollouts.renew(trajectory_id, now_s=20.0)
    assert expire(queue, 25.0) == [trajectory_id]
    assert group.rollout(0).failures == 1, "too long a life is the task's own"
    assert not queue.rollouts.renew(trajectory_id, now_s=26.0)


def test_claims_of_a_slow_runner_last_longer() -> None:
    """A runner with late renewals gets three times the pause between them; others do not."""
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
    """After many renewals in time, its claims have the usual length again."""
    queue = make_queue(rollout_lease_s=10.0)
    add(queue, "a", 0)
    (trajectory_id,) = lease(queue)
    queue.rollouts.renew(trajectory_id, now_s=9.0)
    for second in range(10, 250):
        queue.rollouts.renew(trajectory_id, now_s=float(second))
    assert queue.expire(259.0) == (trajectory_id,)


def test_next_leader_reads_an_abandoned_attempt_as_infrastructure_failure() -> None:
    """The stored reason says whose failure it was."""
    queue = make_queue(term=1, max_attempts=1)
    spec = GroupSpec(task_id=TaskId("a"), index=0, domain="code", shard="s0", size=1)
    group = Group(spec)
    group.recall(StoredAttempt(0, attempt, AttemptState.LOST) for attempt in range(5))
    queue.add_group(group, now_s=0.0)
    assert group.rollout(0).failures == 0
    assert lease(queue) == ["a:0:1000"]
    assert group.rollout(0).phase is RolloutPhase.LEASED


def test_abandon_reason_gives_the_kind_of_failure() -> None:
    """The next leader reads the reason that a runner wrote into the pool."""
    for kind in FailureKind:
        assert kind_of_abandoned(abandon_reason(kind, "no router is there")) is kind
    assert kind_of_abandoned("the rollout was stopped") is FailureKind.TASK


def test_returned_lease_is_leased_again_before_later_rollouts() -> None:
    """It reached no runner, so it counts as no attempt; what is not leased is not returned."""
    queue = make_queue()
    add(queue, "a", 0, size=2)
    assert lease(queue) == ["a:0:0", "a:1:0"]
    queue.rollouts.complete("a:1:0")
    queue.rollouts.give_back(["a:0:0", "a:1:0", "a:0:7"])
    assert len(queue.rollouts) == 0
    add(queue, "b", 1)
    assert lease(queue) == ["a:0:0", "b:0:0"]
    assert queue.rollouts.retries == 0
