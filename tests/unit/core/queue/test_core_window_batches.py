"""The training side of the generation queue: what the window lets out, and two-phase batches."""

from __future__ import annotations

from typing import Any

import pytest

from forge.core.errors import FailedPrecondition, NotFound
from forge.core.queue.admission import GenerationLimit, Mode, QueueSettings
from forge.core.queue.generation_queue import GenerationQueue
from forge.core.queue.groups import AttemptState, Group, GroupSpec, Phase, StoredAttempt
from forge.core.trajectory import TaskId


def make_queue(domains: str, *, term: int = 0, **settings: Any) -> GenerationQueue:
    """One queued group per letter, of the domain the letter names: task `<letter><index>`."""
    defaults: dict[str, Any] = {
        "concurrency": 64,
        "window": 4,
        "admission": GenerationLimit.RUNNING,
        "short_batch_after_s": 5.0,
    }
    queue = GenerationQueue(QueueSettings(**(defaults | settings)), term=term)
    for index, domain in enumerate(domains):
        queue.add_group(make_group(domain, index), now_s=0.0)
    return queue


def make_group(domain: str, index: int, *, shard: str = "s0") -> Group:
    spec = GroupSpec(
        task_id=TaskId(f"{domain}{index}"), index=index, domain=domain, shard=shard, size=1
    )
    return Group(spec)


def complete(queue: GenerationQueue, *task_ids: str) -> None:
    """Start every group, and let these come to their end."""
    queue.rollouts.lease(runner_id="r", max_rollouts=1000, now_s=0.0)
    for task_id in task_ids:
        queue.rollouts.complete(f"{task_id}:0:0")


def complete_again(queue: GenerationQueue, *task_ids: str) -> None:
    """`complete`, under a leader of a later term."""
    for claim in queue.rollouts.lease(runner_id="r", max_rollouts=1000, now_s=0.0):
        if claim.task_id in task_ids:
            queue.rollouts.complete(claim.trajectory_id)


def take(
    queue: GenerationQueue, size: int, *, trainer: str = "t", now_s: float = 0.0
) -> tuple[str, ...]:
    batch = queue.take_batch(trainer_id=trainer, max_groups=size, now_s=now_s)
    return batch.task_ids if batch else ()


def train(queue: GenerationQueue, size: int, *, step: int, now_s: float = 0.0) -> str:
    batch = queue.take_batch(trainer_id="t", max_groups=size, now_s=now_s)
    assert batch is not None
    queue.batches.commit(batch.batch_id, step=step)
    return batch.batch_id


def test_complete_groups_in_the_window_are_taken_at_once() -> None:
    """Strict order is for generation: a hung head delays no group in the window."""
    queue = make_queue("aaaa")
    complete(queue, "a2", "a3")
    assert take(queue, 2) == ("a2", "a3")


def test_complete_group_at_the_window_edge_is_not_taken() -> None:
    """The window is half-open: H+W is outside."""
    queue = make_queue("aaaaaa", window=4)
    complete(queue, "a1", "a4", "a5")
    assert take(queue, 1) == ("a1",)
    assert take(queue, 2, trainer="other") == ()
    status = queue.ledger.totals()
    assert (status.complete_in_window, status.complete_outside_window) == (0, 2)


def test_head_moves_only_when_its_group_is_consumed() -> None:
    """Groups after the head may be trained; the window waits for the head."""
    queue = make_queue("aaaaaa", window=2)
    complete(queue, "a1", "a2")
    train(queue, 1, step=1)
    assert queue.window.head == 0
    assert take(queue, 1) == ()
    queue.rollouts.complete("a0:0:0")
    train(queue, 1, step=2)
    assert queue.window.head == 2
    assert take(queue, 1) == ("a2",)


def test_repeated_lease_request_returns_the_held_batch() -> None:
    """A lost response costs nothing."""
    queue = make_queue("aaaa")
    complete(queue, "a0", "a1", "a2", "a3")
    assert take(queue, 2) == take(queue, 4) == ("a0", "a1")
    assert take(queue, 2, trainer="other") == ("a2", "a3")


def test_domains_fill_their_quotas() -> None:
    """Shares hold in every batch, not the order of completion."""
    queue = make_queue("aaaabb", window=6, domain_shares={"a": 0.5, "b": 0.5})
    complete(queue, "a0", "a1", "a2", "a3", "b4", "b5")
    assert take(queue, 4) == ("a0", "a1", "b4", "b5")


def test_quota_is_reserved_while_groups_of_its_domain_are_in_the_window() -> None:
    """As long as one of them may complete, its part of the batch stays reserved."""
    queue = make_queue("aaab", domain_shares={"a": 0.5, "b": 0.5})
    complete(queue, "a0", "a1", "a2")
    assert take(queue, 2) == ()
    queue.rollouts.complete("b3:0:0")
    assert take(queue, 2) == ("a0", "b3")


def test_quota_of_a_domain_without_groups_in_the_window_is_given_to_others() -> None:
    """Shares never block where waiting cannot help."""
    queue = make_queue("aaaaaab", window=4, domain_shares={"a": 0.5, "b": 0.5})
    complete(queue, "a0", "a1", "b6")
    assert take(queue, 2) == ("a0", "a1")


def test_domain_without_a_share_is_trained_when_it_fills_the_window() -> None:
    """It never blocks the queue: it fills the batch in the end."""
    queue = make_queue("zzzz", domain_shares={"a": 1.0})
    complete(queue, "z0", "z1", "z2", "z3")
    assert take(queue, 2) == ("z0", "z1")


def test_batch_waits_until_it_is_full() -> None:
    """While a group in the window may complete, no short batch is returned."""
    queue = make_queue("aaaa")
    complete(queue, "a0", "a1", "a2")
    assert take(queue, 4) == ()
    queue.rollouts.complete("a3:0:0")
    assert take(queue, 4) == ("a0", "a1", "a2", "a3")


def test_fifo_batch_larger_than_the_window_is_short() -> None:
    """It is chosen at once: a full one would never exist."""
    queue = make_queue("aaaaaa", mode=Mode.FIFO, batch_groups=2)
    complete(queue, "a0", "a1", "a2", "a3", "a4", "a5")
    assert take(queue, 8) == ("a0", "a1")


def test_batch_larger_than_admission_is_short() -> None:
    """With N below W, no batch waits for groups that may not start."""
    queue = make_queue(
        "aaaaaa", mode=Mode.FIFO, batch_groups=6, concurrency=2, admission=GenerationLimit.WINDOW
    )
    complete(queue, "a0", "a1")
    assert take(queue, 4) == ("a0", "a1")


def test_last_batch_of_a_queue_is_short_after_a_wait() -> None:
    """A batch waits for more submissions, but not forever."""
    queue = make_queue("aaa", short_batch_after_s=5.0)
    complete(queue, "a0", "a1", "a2")
    assert take(queue, 4, now_s=4.9) == ()
    assert take(queue, 4, now_s=5.0) == ("a0", "a1", "a2")


def test_groups_of_an_unreachable_shard_delay_no_batch() -> None:
    """They are not taken, and batches of the other shards are."""
    queue = make_queue("")
    for index, shard in enumerate(("s0", "s1", "s0", "s1")):
        queue.add_group(make_group("a", index, shard=shard), now_s=0.0)
    complete(queue, "a0", "a1", "a2")
    queue.set_away(frozenset({"s1"}))
    assert take(queue, 3, now_s=9.0) == ("a0", "a2")
    queue.set_away(frozenset())
    assert take(queue, 1, trainer="other") == ("a1",)


def test_smaller_batch_is_taken_while_a_shard_is_unreachable() -> None:
    """More groups are assigned to the open batch than it needs."""
    queue = make_queue("")
    for index, shard in enumerate(("s0", "s0", "s0", "s1", "s0", "s0")):
        queue.add_group(make_group("a", index, shard=shard), now_s=0.0)
    complete(queue, "a0", "a1")
    assert take(queue, 3) == ()
    queue.rollouts.complete("a2:0:0")
    queue.set_away(frozenset({"s1"}))
    assert take(queue, 1) == ("a0",)


def test_batch_of_an_expired_lease_returns_to_its_place() -> None:
    """The groups of a dead trainer become visible again by themselves."""
    queue = make_queue("aa", batch_lease_s=30.0)
    complete(queue, "a0", "a1")
    batch = queue.take_batch(trainer_id="t", max_groups=2, now_s=0.0)
    assert batch is not None
    queue.batches.renew(batch.batch_id, now_s=10.0)
    queue.expire(39.9)
    assert queue.ledger.group("a0").phase is Phase.BATCHED
    queue.expire(40.0)
    with pytest.raises(NotFound, match=batch.batch_id):
        queue.batches.renew(batch.batch_id, now_s=40.0)
    assert take(queue, 2, trainer="other", now_s=40.0) == ("a0", "a1")


def test_commit_is_idempotent_and_bound_to_its_step() -> None:
    """A repeated commit changes nothing; the same batch under another step is an error."""
    queue = make_queue("a")
    complete(queue, "a0")
    batch_id = train(queue, 1, step=7, now_s=9.0)
    again = queue.batches.prepare_commit(batch_id, step=7, task_ids=("a0",), now_s=9.0)
    assert again == ()
    with pytest.raises(FailedPrecondition, match="by step 7, not by step 8"):
        queue.batches.prepare_commit(batch_id, step=8, task_ids=("a0",), now_s=9.0)


def test_batch_of_an_earlier_leader_is_committed_by_its_groups() -> None:
    """A change of leader between step and commit must not train the groups twice."""
    queue = make_queue("aa", term=1)
    for task_id in ("a0", "a1"):
        queue.rollouts.complete(f"{task_id}:0:0")
    prepared = queue.batches.prepare_commit("batch-0-0", step=3, task_ids=("a0", "a1"), now_s=0.0)
    assert prepared == ("a0", "a1")
    queue.batches.commit("batch-0-0", step=3)
    assert queue.ledger.totals().trained == 2


def test_batch_of_an_earlier_term_stays_with_its_trainer() -> None:
    """A new leader learns the open batches before it leases any: no step is lost."""
    queue = make_queue("aa", term=1)
    for task_id in ("a0", "a1"):
        queue.rollouts.complete(f"{task_id}:0:0")
    for _ in range(2):
        queue.batches.adopt("batch-0-0", ("a0",), now_s=9.0)
    assert take(queue, 1, now_s=9.0) == ("a1",)
    assert queue.batches.prepare_commit("batch-0-0", step=3, task_ids=("a0",), now_s=9.0) == ("a0",)


def test_returned_batch_is_not_adopted() -> None:
    """A claim on groups of another batch fails at its commit."""
    queue = make_queue("a", term=1)
    queue.rollouts.complete("a0:0:0")
    assert take(queue, 1, trainer="other", now_s=9.0) == ("a0",)
    queue.batches.adopt("batch-0-0", ("a0",), now_s=9.0)
    assert queue.batches.get("batch-0-0") is None


def test_partly_stored_commit_is_completed() -> None:
    """One shard stored its part, the other did not, and then the leader died."""
    queue = make_queue("", term=1)
    stored, lost = make_group("a", 0), make_group("a", 1)
    stored.phase, stored.batch_id, stored.step = Phase.TRAINED, "batch-0-0", 3
    for group in (stored, lost):
        group.recall([StoredAttempt(0, 0, AttemptState.SEALED)])
    stored.close()
    queue.add_group(stored, now_s=0.0)
    queue.add_group(lost, now_s=0.0)
    prepared = queue.batches.prepare_commit("batch-0-0", step=3, task_ids=("a0", "a1"), now_s=0.0)
    assert prepared == ("a1",)


def test_batch_is_refused_after_its_groups_went_to_another() -> None:
    """The late trainer must discard its step: the groups are trained once."""
    queue = make_queue("a", batch_lease_s=10.0)
    complete(queue, "a0")
    late = queue.take_batch(trainer_id="late", max_groups=1, now_s=5.0)
    assert late is not None
    queue.expire(15.0)
    assert take(queue, 1, trainer="other", now_s=15.0) == ("a0",)
    with pytest.raises(NotFound, match="'a0' is batched now: discard the step"):
        queue.batches.prepare_commit(late.batch_id, step=1, task_ids=("a0",), now_s=15.0)


def test_group_held_twice_and_released_is_taken_once() -> None:
    """A returned group is in one batch at a time."""
    queue = make_queue("aa", term=1)
    for task_id in ("a0", "a1"):
        queue.rollouts.complete(f"{task_id}:0:0")
    for _ in range(3):
        queue.batches.prepare_commit("batch-0-0", step=1, task_ids=("a0",), now_s=0.0)
        queue.batches.release("batch-0-0")
    assert take(queue, 2, now_s=9.0) == ("a0", "a1")


def test_release_with_a_reason_tombstones_the_groups() -> None:
    """Groups that cannot be trained count as consumed, with the reason."""
    queue = make_queue("aa")
    complete(queue, "a0", "a1")
    batch = queue.take_batch(trainer_id="t", max_groups=1, now_s=0.0)
    assert batch is not None
    assert queue.batches.prepare_release(batch.batch_id, now_s=0.0) == ("a0",)
    queue.batches.release(batch.batch_id, {"a0": "checksum failed"})
    queue.batches.release(batch.batch_id, {"a0": "checksum failed"})
    assert queue.ledger.group("a0").reason == "checksum failed"
    assert queue.window.head == 1


def test_group_named_twice_is_held_once() -> None:
    """A careless client cannot break the counts."""
    queue = make_queue("ab", term=1)
    complete_again(queue, "a0", "b1")
    queue.batches.adopt("batch-0-0", ("a0", "a0"), now_s=5.0)
    assert take(queue, 1, now_s=5.0) == ("b1",)
    queue.batches.release("batch-0-0")
    assert queue.batches.prepare_commit("batch-0-1", step=1, task_ids=("a0", "a0"), now_s=5.0) == (
        "a0",
    )
    queue.batches.commit("batch-0-1", step=1)
    assert (queue.ledger.totals().trained, queue.ledger.totals().pending) == (1, 1)


@pytest.mark.parametrize("batch_id", ["batch-1-0", "batch-1-7", "batch-2-0"])
def test_batch_never_leased_cannot_be_held(batch_id: str) -> None:
    """Its name will belong to another batch, whose groups would be lost."""
    queue = make_queue("a", term=1)
    complete_again(queue, "a0")
    queue.batches.adopt(batch_id, ("a0",), now_s=5.0)
    with pytest.raises(NotFound, match="never granted"):
        queue.batches.prepare_commit(batch_id, step=1, task_ids=("a0",), now_s=5.0)
    assert take(queue, 1, now_s=5.0) == ("a0",)


def test_rewind_makes_later_steps_visible_again() -> None:
    """A trainer that went back to step 1 gets what steps 2 and 3 had consumed, and H follows."""
    queue = make_queue("aaa")
    complete(queue, "a0", "a1", "a2")
    for step in (1, 2, 3):
        train(queue, 1, step=step)
    assert queue.window.head == 3
    assert queue.batches.prepare_rewind(1) == ("a1", "a2")
    assert queue.batches.rewind(1) == 2
    assert queue.window.head == 1
    assert queue.ledger.totals().trained == 1
    assert take(queue, 2) == ("a1", "a2")


def test_rewind_ends_open_batches() -> None:
    """The step of a trainer that was replaced is in no surviving checkpoint."""
    queue = make_queue("a")
    complete(queue, "a0")
    batch = queue.take_batch(trainer_id="t", max_groups=1, now_s=5.0)
    assert batch is not None
    queue.batches.prepare_rewind(0)
    queue.batches.rewind(0)
    with pytest.raises(NotFound, match="were returned"):
        queue.batches.prepare_commit(batch.batch_id, step=1, task_ids=("a0",), now_s=5.0)
    assert take(queue, 1, now_s=5.0) == ("a0",)


def test_rewind_undoes_a_partly_stored_commit() -> None:
    """One shard stored its part, the other did not, and the trainer died: neither is trained on."""
    queue = make_queue("ab")
    complete(queue, "a0", "b1")
    batch = queue.take_batch(trainer_id="t", max_groups=2, now_s=5.0)
    assert batch is not None
    queue.batches.prepare_commit(batch.batch_id, step=1, task_ids=batch.task_ids, now_s=5.0)
    assert set(queue.batches.prepare_rewind(0)) == {"a0", "b1"}
    assert queue.batches.rewind(0) == 0
    train(queue, 2, step=1, now_s=5.0)
    assert queue.batches.prepare_rewind(1) == ()


def test_missing_queue_index_does_not_hold_the_head() -> None:
    """A failed submission leaves a gap; no group will fill it."""
    queue = make_queue("a")
    queue.add_group(make_group("a", 2), now_s=0.0)
    complete(queue, "a0")
    train(queue, 1, step=1, now_s=9.0)
    assert queue.window.head == 2
    queue.add_group(make_group("a", 1), now_s=9.0)
    assert queue.window.head == 1


def test_cost_of_take_does_not_grow_with_the_queue() -> None:
    """Leasing, completing and taking read the front of the queue only."""
    queue = make_queue("a" * 20_000, window=32)
    touched = 0
    group_of = queue.window._groups

    class Counting(dict):  # type: ignore[type-arg]
        def __getitem__(self, key: int) -> Group:
            nonlocal touched
            touched += 1
            found: Group = super().__getitem__(key)
            return found

    queue.window._groups = Counting(group_of)
    for step in range(1, 11):
        for claim in queue.rollouts.lease(runner_id="r", max_rollouts=8, now_s=9.0):
            queue.rollouts.complete(claim.trajectory_id)
        train(queue, 8, step=step, now_s=9.0)
    assert queue.ledger.totals().trained == 80
    assert touched < 80 * 8
