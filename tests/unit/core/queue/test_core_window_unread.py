"""A term that begins without a pool shard: what may be on it is waited for, and never passed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from forge.core.queue.admission import Mode, QueueSettings
from forge.core.queue.generation_queue import GenerationQueue
from forge.core.queue.groups import AttemptState, Group, GroupSpec, Phase, StoredAttempt
from forge.core.trajectory import TaskId

SIZE = 4


def make_group(index: int, *, shard: str = "s0", phase: Phase = Phase.QUEUED) -> Group:
    spec = GroupSpec(task_id=TaskId(f"t{index}"), index=index, domain="code", shard=shard, size=1)
    group = Group(spec)
    if phase is Phase.COMPLETE:
        group.recall([StoredAttempt(0, 0, AttemptState.SEALED)])
    elif phase.consumed:
        group.phase = phase
        group.close()
    return group


def make_queue(head: int | None, *, mode: Mode = Mode.WINDOWED) -> GenerationQueue:
    settings = QueueSettings(
        concurrency=8, window=SIZE if mode is Mode.WINDOWED else 0, mode=mode, batch_groups=2
    )
    queue = GenerationQueue(settings, term=1)
    queue.window.unknown_from = head
    return queue


def take(queue: GenerationQueue, size: int) -> list[str]:
    batch = queue.take_batch(trainer_id="t", max_groups=size, now_s=1e6)
    return list(batch.task_ids) if batch else []


def take_id(queue: GenerationQueue) -> str:
    """Of the batch that the trainer holds."""
    batch = queue.take_batch(trainer_id="t", max_groups=1, now_s=1e6)
    assert batch is not None
    return batch.batch_id


def test_head_waits_at_an_index_of_an_unread_shard() -> None:
    """Not below the recorded consumed index; an index without a shard does not exist there."""
    queue = make_queue(2)
    for index in (0, 1, 2, 4, 5, 9):
        phase = Phase.TRAINED if index < 3 else Phase.QUEUED
        queue.add_group(make_group(index, phase=phase), now_s=0.0)
    assert (queue.window.head, queue.window.edge) == (3, 7)
    queue.window.all_known()
    assert queue.window.head == 4


def test_groups_in_the_window_are_trained_while_a_shard_is_unread() -> None:
    """As while a shard is unreachable: up to H+W, and no further."""
    queue = make_queue(0)
    for index in (1, 2, 3, 4, 5):
        queue.add_group(make_group(index, phase=Phase.COMPLETE), now_s=0.0)
    assert take(queue, 3) == ["t1", "t2", "t3"]
    queue.add_group(make_group(0, shard="s1", phase=Phase.TRAINED), now_s=0.0)
    queue.window.all_known()
    assert queue.window.head >= 1


def test_fifo_stops_at_an_index_of_an_unread_shard() -> None:
    """No group overtakes a group that may be there."""
    queue = make_queue(0, mode=Mode.FIFO)
    for index in (0, 2, 3):
        queue.add_group(make_group(index, phase=Phase.COMPLETE), now_s=0.0)
    assert take(queue, 2) == ["t0"]
    queue.batches.release(take_id(queue))
    queue.window.all_known()
    assert take(queue, 2) == ["t0", "t2"]


phases = st.sampled_from([Phase.QUEUED, Phase.COMPLETE, Phase.TRAINED, Phase.TOMBSTONED])


@given(
    groups=st.lists(st.tuples(st.sampled_from(["s0", "s1", ""]), phases), max_size=24),
    noted=st.integers(0, 24),
    together=st.booleans(),
)
def test_late_shard_gives_the_same_queue_as_both_at_once(
    groups: list[tuple[str, Phase]], noted: int, together: bool
) -> None:
    """For any contents and any recorded bound: before, the head passes only consumed groups; after,
    the queue is as if both shards had been read at once ("": an index without a shard)."""
    made = [(index, shard, phase) for index, (shard, phase) in enumerate(groups) if shard]
    pending = [index for index, _, phase in made if not phase.consumed]
    head = min(noted, *pending) if pending else noted

    def restore(queue: GenerationQueue, wanted: str) -> None:
        found = [
            make_group(index, shard=shard, phase=phase)
            for index, shard, phase in made
            if shard in wanted.split()
        ]
        if together and all(group.phase.consumed or not group.rollouts for group in found):
            queue.add_at_rest([g.spec.task_id for g in found], found, now_s=0.0)
        else:
            for group in found:
                queue.add_group(group, now_s=0.0)

    late, both = make_queue(head), make_queue(None)
    restore(late, "s0")
    assert all(index >= late.window.head for index in pending), "it passed a group"
    restore(late, "s1")
    late.window.all_known()
    restore(both, "s0 s1")
    for queue in (late, both):
        assert queue.ledger.totals() == both.ledger.totals()
        assert queue.window.head == both.ledger.window.head
        assert queue.window.edge == both.ledger.window.edge
    assert take(late, 3) == take(both, 3)


def test_claims_on_unread_groups_are_adopted_later() -> None:
    """A runner that renews while its shard is awaited keeps its rollout."""
    queue = make_queue(0)
    rollouts = queue.rollouts
    assert rollouts.renew_unread("t0:0:0", now_s=0.0)
    assert rollouts.renew_unread("t1:0:0", now_s=0.0)
    assert len(rollouts) == 0
    group = make_group(0, shard="s1")
    group.recall([StoredAttempt(0, 0, AttemptState.OPEN)])
    queue.add_group(group, now_s=1.0)
    rollouts.all_read(now_s=1.0)
    assert len(rollouts) == 1
    assert rollouts.lease(runner_id="other", max_rollouts=9, now_s=2.0) == ()
    assert not rollouts.renew("t1:0:0", now_s=2.0), "nobody knows it"
