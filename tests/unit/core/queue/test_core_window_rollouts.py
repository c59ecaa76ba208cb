"""The sampling side of the generation queue: order, claims, retries, admission, leaders."""

from __future__ import annotations

from typing import Any

import pytest

from forge.core.errors import InvalidArgument, NotFound
from forge.core.queue.admission import GenerationLimit, PartialGroups, QueueSettings
from forge.core.queue.dispatch.lanes import Lanes
from forge.core.queue.generation_queue import GenerationQueue
from forge.core.queue.groups import AttemptState, Group, GroupSpec, Phase, StoredAttempt
from forge.core.trajectory import TaskId


def make_queue(*, term: int = 0, hold_s: float = 0.0, **settings: Any) -> GenerationQueue:
    defaults: dict[str, Any] = {"concurrency": 4, "window": 8, "rollout_lease_s": 10.0}
    queue = GenerationQueue(QueueSettings(**(defaults | settings)), term=term)
    queue.rollouts.hold(until_s=hold_s)
    return queue


def make_group(name: str, index: int, *, size: int = 1, **spec: Any) -> Group:
    return Group(
        GroupSpec(
            task_id=TaskId(name),
            index=index,
            size=size,
            **({"domain": "code", "shard": "s0"} | spec),
        )
    )


def add(queue: GenerationQueue, *groups: Group, now_s: float = 0.0) -> None:
    for group in groups:
        queue.add_group(group, now_s=now_s)


def lease(queue: GenerationQueue, count: int = 100, *, now_s: float = 0.0) -> list[str]:
    claims = queue.rollouts.lease(runner_id="r", max_rollouts=count, now_s=now_s)
    return [claim.trajectory_id for claim in claims]


def fail(queue: GenerationQueue, trajectory_id: str, *, now_s: float = 0.0, **kind: bool) -> bool:
    return queue.rollouts.fail(
        trajectory_id, reason="died", permanent=kind.get("permanent", False), now_s=now_s
    )


def test_rollouts_are_leased_in_queue_and_rollout_order() -> None:
    """Groups by queue index, and the rollouts of a group one after the other."""
    queue = make_queue()
    add(queue, make_group("a", 0, size=2), make_group("b", 1, size=2))
    assert lease(queue, 3) == ["a:0:0", "a:1:0", "b:0:0"]
    assert lease(queue, 3) == ["b:1:0"]


def test_at_most_n_groups_run() -> None:
    """The group after the N-th starts only when one of them has ended."""
    queue = make_queue(concurrency=2, admission=GenerationLimit.RUNNING)
    add(queue, *(make_group(name, index) for index, name in enumerate("abc")))
    assert lease(queue) == ["a:0:0", "b:0:0"]
    assert lease(queue) == []
    queue.rollouts.complete("b:0:0")
    assert lease(queue) == ["c:0:0"]


def test_window_admission_counts_untaken_groups() -> None:
    """Complete groups hold generation back until a batch takes them."""
    queue = make_queue(concurrency=2, admission=GenerationLimit.WINDOW)
    add(queue, *(make_group(name, index) for index, name in enumerate("abc")))
    for trajectory_id in lease(queue):
        queue.rollouts.complete(trajectory_id)
    assert lease(queue) == []
    assert queue.take_batch(trainer_id="t", max_groups=1, now_s=0.0) is not None
    assert lease(queue) == ["c:0:0"]


def test_ahead_admission_is_bounded_by_the_head() -> None:
    """Only groups less than M positions from the head start."""
    queue = make_queue(concurrency=4, admission=GenerationLimit.AHEAD, ahead=2)
    add(queue, *(make_group(name, index) for index, name in enumerate("abcd")))
    assert lease(queue) == ["a:0:0", "b:0:0"]
    queue.rollouts.complete("b:0:0")
    assert lease(queue) == []
    queue.rollouts.complete("a:0:0")
    batch = queue.take_batch(trainer_id="t", max_groups=2, now_s=0.0)
    assert batch is not None
    queue.batches.commit(batch.batch_id, step=1)
    assert lease(queue) == ["c:0:0", "d:0:0"]


def test_evaluation_goes_first_and_is_never_in_a_batch() -> None:
    """Evaluation groups have a queue of their own, ahead of training."""
    queue = make_queue()
    add(queue, make_group("a", 0), make_group("e", 0, evaluation=True))
    assert lease(queue) == ["e:0:0", "a:0:0"]
    queue.rollouts.complete("e:0:0")
    assert queue.ledger.group("e").phase is Phase.EVALUATED
    assert queue.take_batch(trainer_id="t", max_groups=2, now_s=99.0) is None
    assert queue.ledger.totals().accepted == 1


def test_failed_rollout_is_retried_after_a_back_off_under_a_new_attempt() -> None:
    """The second attempt waits, and has its own number."""
    queue = make_queue(retry_backoff_s=5.0)
    add(queue, make_group("a", 0))
    assert lease(queue) == ["a:0:0"]
    assert fail(queue, "a:0:0")
    assert lease(queue, now_s=4.9) == []
    (claim,) = queue.rollouts.lease(runner_id="r", max_rollouts=1, now_s=5.0)
    assert (claim.trajectory_id, claim.failures) == ("a:0:1", 1)


def test_back_off_doubles_up_to_its_limit() -> None:
    """Waits are retry_backoff_s, twice that, ... and never above max_backoff_s."""
    settings = QueueSettings(concurrency=1, retry_backoff_s=1.0, max_backoff_s=5.0)
    assert [settings.backoff_s(failures) for failures in (1, 2, 3, 4, 1000)] == [1, 2, 4, 5, 5]


def test_group_is_tombstoned_when_a_rollout_has_no_attempts_left() -> None:
    """A partial group is never trained: the whole group is tombstoned with the reason, and H
    passes."""
    queue = make_queue(max_attempts=2, retry_backoff_s=0.0)
    add(queue, make_group("a", 0, size=2), make_group("b", 1))
    lease(queue)
    queue.rollouts.complete("a:0:0")
    fail(queue, "a:1:0")
    lease(queue)
    fail(queue, "a:1:1")
    group = queue.ledger.group("a")
    assert (group.phase, group.reason) == (Phase.TOMBSTONED, "rollout 1: died")
    assert queue.window.head == 1
    assert queue.ledger.settled() == (group,)
    assert group.sealed_ids() == ("a:0:0",)


def test_permanent_failure_ends_the_group_at_once() -> None:
    """It is not attempted again, and its other claims end."""
    queue = make_queue(max_attempts=9)
    add(queue, make_group("a", 0, size=2))
    lease(queue)
    fail(queue, "a:0:0", permanent=True)
    assert queue.ledger.group("a").phase is Phase.TOMBSTONED
    assert not queue.rollouts.renew("a:1:0", now_s=0.0)
    assert len(queue.rollouts) == 0


def test_drop_tombstones_a_group_at_the_first_failure() -> None:
    """`drop`: no second attempt, under any max_attempts."""
    queue = make_queue(partial_groups=PartialGroups.DROP, max_attempts=9)
    add(queue, make_group("a", 0, size=2))
    lease(queue)
    fail(queue, "a:1:0")
    assert queue.ledger.group("a").reason == "rollout 1: died"


def test_wait_attempts_a_rollout_far_beyond_max_attempts() -> None:
    """`wait`: until the last attempt number of this term."""
    queue = make_queue(
        term=2, partial_groups=PartialGroups.WAIT, max_attempts=1, retry_backoff_s=0.0
    )
    add(queue, make_group("a", 0))
    group = queue.ledger.group("a")
    for attempt in range(2000, 3000):
        assert group.phase.open
        assert lease(queue) == [f"a:0:{attempt}"]
        fail(queue, f"a:0:{attempt}")
    assert group.phase is Phase.TOMBSTONED


def test_expired_claim_is_reported_until_it_is_settled() -> None:
    """Expiry decides nothing by itself: the pool may hold the sealed trajectory."""
    queue = make_queue(rollout_lease_s=10.0)
    add(queue, make_group("a", 0))
    lease(queue)
    assert queue.expire(9.9) == ()
    assert queue.expire(10.0) == ("a:0:0",)
    assert queue.expire(11.9) == ()
    assert queue.expire(12.0) == ("a:0:0",)
    assert queue.rollouts.complete("a:0:0")
    assert queue.expire(99.0) == ()


def test_renewed_claim_does_not_expire() -> None:
    """A renewal moves the end of the claim."""
    queue = make_queue(rollout_lease_s=10.0)
    add(queue, make_group("a", 0))
    lease(queue)
    assert queue.rollouts.renew("a:0:0", now_s=3.0)
    assert queue.expire(12.9) == ()
    assert queue.expire(13.0) == ("a:0:0",)


def test_hung_rollout_loses_its_claim() -> None:
    """No renewal extends it beyond rollout_timeout_s."""
    queue = make_queue(rollout_lease_s=10.0, rollout_timeout_s=15.0)
    add(queue, make_group("a", 0))
    lease(queue)
    assert queue.rollouts.renew("a:0:0", now_s=9.0)
    assert queue.expire(15.0) == ("a:0:0",)
    assert not queue.rollouts.renew("a:0:0", now_s=15.0)


def test_sealed_attempt_of_an_expired_claim_counts() -> None:
    """Its work is kept, and the newer attempt ends."""
    queue = make_queue(retry_backoff_s=0.0)
    add(queue, make_group("a", 0))
    lease(queue)
    fail(queue, "a:0:0")
    assert lease(queue) == ["a:0:1"]
    assert queue.rollouts.complete("a:0:0")
    assert not queue.rollouts.renew("a:0:1", now_s=0.0)
    assert queue.ledger.group("a").sealed_ids() == ("a:0:0",)


def test_second_sealed_attempt_is_surplus() -> None:
    """One trajectory per rollout counts; another one is counted as surplus only."""
    queue = make_queue(retry_backoff_s=0.0)
    add(queue, make_group("a", 0))
    lease(queue)
    fail(queue, "a:0:0")
    lease(queue)
    assert queue.rollouts.complete("a:0:1")
    assert not queue.rollouts.complete("a:0:0")
    assert not queue.rollouts.complete("a:0:1")
    assert queue.rollouts.surplus == 1


def test_seal_during_the_back_off_ends_the_retry() -> None:
    """A rollout whose trajectory is found during its wait is not sampled again."""
    queue = make_queue(retry_backoff_s=5.0)
    add(queue, make_group("a", 0, size=2))
    lease(queue)
    fail(queue, "a:0:0")
    queue.rollouts.complete("a:0:0")
    assert lease(queue, now_s=50.0) == []
    assert queue.ledger.group("a").sealed == 1


def test_repeated_failure_report_counts_once() -> None:
    """FinishRollouts is idempotent."""
    queue = make_queue(max_attempts=2)
    add(queue, make_group("a", 0))
    lease(queue)
    assert fail(queue, "a:0:0")
    assert not fail(queue, "a:0:0")
    assert queue.rollouts.retries == 1


def test_unreachable_shard_keeps_its_groups() -> None:
    """An outage of one shard delays its own groups only; none is tombstoned."""
    queue = make_queue(concurrency=8)
    add(queue, make_group("a", 0), make_group("b", 1, shard="s1"), make_group("c", 2))
    queue.set_away(frozenset({"s0"}))
    assert lease(queue) == ["b:0:0"]
    queue.set_away(frozenset())
    assert lease(queue) == ["a:0:0", "c:0:0"]


def test_rollout_in_back_off_follows_its_group_to_another_shard() -> None:
    """Its entry in the order of leases was for the former shard."""
    queue = make_queue(retry_backoff_s=5.0)
    add(queue, make_group("a", 0))
    assert lease(queue, 1) == ["a:0:0"]
    assert fail(queue, "a:0:0")
    queue.ledger.relocate({TaskId("a"): None}, source="s0", target="s1")
    assert lease(queue, now_s=5.0) == ["a:0:1"]


def test_lease_ends_when_its_group_moves_to_another_shard() -> None:
    """The token of an attempt names the former shard, which refuses its turns from then on."""
    queue = make_queue()
    add(queue, make_group("a", 0))
    assert lease(queue, 1) == ["a:0:0"]
    queue.rollouts.lapse("a:0:0", now_s=30.0)
    queue.ledger.relocate({TaskId("a"): None}, source="s0", target="s1")
    assert not queue.rollouts.renew("a:0:0", now_s=31.0)
    assert lease(queue, now_s=60.0) == ["a:0:1"]


def test_attempt_of_an_earlier_term_ends_when_its_group_moves() -> None:
    """Its runner was silent for longer than the new leader waits for renewals."""
    queue = make_queue(term=1)
    add(queue, make_group("a", 0))
    queue.ledger.relocate({TaskId("a"): None}, source="s0", target="s1")
    assert not queue.rollouts.renew("a:0:0", now_s=1.0)
    assert lease(queue, now_s=1.0) == ["a:0:1000"]


def test_new_leader_adopts_renewed_claims() -> None:
    """A change of leader loses no running work: runners renew, and keep their rollouts."""
    queue = make_queue(term=1, hold_s=10.0)
    group = make_group("a", 0, size=2)
    group.recall([StoredAttempt(0, 0, AttemptState.OPEN)])
    add(queue, group)
    assert lease(queue, now_s=9.0) == []
    assert queue.rollouts.renew("a:0:0", now_s=9.0)
    assert lease(queue, now_s=10.0) == ["a:1:1000"]


def test_attempt_numbers_of_two_leaders_differ() -> None:
    """An attempt unknown to the new leader may still write its trajectory."""
    queue = make_queue(term=3)
    add(queue, make_group("a", 0))
    assert lease(queue) == ["a:0:3000"]
    assert not queue.rollouts.renew("a:0:7", now_s=0.0), "somebody else has the rollout now"


def test_claim_never_leased_cannot_be_renewed() -> None:
    """An invented attempt of this term is no claim."""
    queue = make_queue()
    add(queue, make_group("a", 0))
    assert not queue.rollouts.renew("a:0:0", now_s=0.0)
    assert not queue.rollouts.renew("nobody:0:0", now_s=0.0)


def test_abandoned_attempts_of_an_earlier_term_count_as_failures() -> None:
    """A rollout that fails under every leader is tombstoned all the same."""
    queue = make_queue(term=1, max_attempts=2)
    group = make_group("a", 0)
    group.recall([StoredAttempt(0, 0, AttemptState.ABANDONED)])
    add(queue, group)
    (trajectory_id,) = lease(queue)
    fail(queue, trajectory_id)
    assert queue.ledger.group("a").phase is Phase.TOMBSTONED


def test_unknown_names_are_not_found() -> None:
    """The message names the trajectory, or the range its index must be in."""
    queue = make_queue()
    add(queue, make_group("a", 0))
    with pytest.raises(NotFound, match="'x' is not in the queue"):
        queue.rollouts.complete("x:0:0")
    with pytest.raises(NotFound, match="has rollouts 0 to 0"):
        queue.rollouts.complete("a:1:0")
    with pytest.raises(InvalidArgument, match="'garbage'"):
        queue.rollouts.complete("garbage")


def test_second_submission_of_a_group_is_an_error() -> None:
    """The service answers repeated submissions before."""
    queue = make_queue()
    add(queue, make_group("a", 0))
    with pytest.raises(InvalidArgument, match="'a' was submitted before"):
        add(queue, make_group("a", 1))


def test_tombstoned_group_forgets_its_unleased_rollouts() -> None:
    """Those of its rollouts that were still to go out are forgotten with it."""
    queue = make_queue()
    group = make_group("a", 0, size=8)
    add(queue, group, make_group("b", 1))
    assert fail(queue, *lease(queue, 1), permanent=True)
    assert lease(queue) == ["b:0:0"]
    assert group.phase is Phase.TOMBSTONED
    assert not group.rollouts


def test_next_event_is_the_earliest_change_by_time_alone() -> None:
    """The caller need not poll the queue."""
    queue = make_queue(retry_backoff_s=3.0, rollout_lease_s=10.0, short_batch_after_s=1.0)
    add(queue, make_group("a", 0), make_group("b", 1))
    assert queue.next_event_s(0.0) == 1.0
    lease(queue)
    assert queue.next_event_s(1.0) == 10.0
    fail(queue, "a:0:0", now_s=1.0)
    assert queue.next_event_s(1.0) == 4.0


def test_lease_costs_nothing_for_kinds_of_tasks_that_have_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A long run may have thousands of scaffolds, one after the other."""
    looks = 0

    def first(lanes: Lanes[Any], away: frozenset[str]) -> Any:
        nonlocal looks
        looks += 1
        return search(lanes, away)

    search = Lanes.first
    monkeypatch.setattr(Lanes, "first", first)
    queue = make_queue(admission=GenerationLimit.RUNNING)
    for index in range(50):
        looks = 0
        add(queue, make_group(f"task-{index}", index, scaffold=f"scaffold-{index}"))
        (claim,) = lease(queue, 1)
        queue.rollouts.complete(claim)
    assert looks <= 8
