"""A batch fills group by group: assignments, the moves of the head, and lost batches."""

from __future__ import annotations

import pytest

from forge.core.errors import NotFound
from forge.core.queue.admission import GenerationLimit, Mode
from forge.core.queue.groups import Phase
from tests.support.core.filling import LATE_S, add, complete, make_queue, take, taken


def test_head_passes_assigned_groups_before_the_batch_is_full() -> None:
    """A group inside the window is assigned at once, and the window moves."""
    queue = make_queue("aaaaaa", window=2)
    complete(queue, "a0", "a2")
    assert taken(queue, 3) == ()
    assert (queue.window.head, queue.window.edge) == (1, 3)
    complete(queue, "a5", "a1")
    assert taken(queue, 3) == ("a0", "a1", "a2"), "a5 was beyond the edge when the batch was full"
    assert queue.window.head == 3


def test_batch_larger_than_the_window_is_filled() -> None:
    """W bounds the visible groups, not the size of a batch."""
    queue = make_queue("aaaaaaaa", window=2)
    complete(queue, *(f"a{index}" for index in (1, 0, 3, 2, 5, 4)))
    assert taken(queue, 6) == tuple(f"a{index}" for index in range(6))


def test_next_batch_is_filled_while_one_is_leased() -> None:
    """A trainer prefetches: batch k+1 is taken before batch k is committed, in every mode."""
    for mode, window in ((Mode.FIFO, 0), (Mode.WINDOWED, 2)):
        queue = make_queue("aaaaaa", mode=mode, batch_groups=2, window=window)
        complete(queue, "a0", "a1", "a2", "a3")
        assert taken(queue, 2) == ("a0", "a1")
        assert taken(queue, 2, trainer="ahead") == ("a2", "a3"), mode


def test_returned_batch_comes_first_in_the_next_batch() -> None:
    """H and the edge stay: the returned groups are below them, and older than the assigned ones."""
    queue = make_queue("aaaaaaaa", window=3)
    complete(queue, "a0", "a1")
    batch = take(queue, 2)
    assert batch is not None
    complete(queue, "a2")
    assert taken(queue, 2, trainer="ahead") == ()
    before = (queue.window.head, queue.window.edge)
    queue.batches.release(batch.batch_id)
    assert (queue.window.head, queue.window.edge) == before == (3, 6)
    assert taken(queue, 2, trainer="ahead") == ("a0", "a1")
    complete(queue, "a3")
    assert taken(queue, 2) == ("a2", "a3")


def test_fifo_takes_returned_groups_first() -> None:
    """No group overtakes them."""
    queue = make_queue("aaaaaaaa", mode=Mode.FIFO, batch_groups=2, window=0, batch_lease_s=10.0)
    complete(queue, "a0", "a1", "a2", "a3")
    assert taken(queue, 2) == ("a0", "a1")
    queue.expire(LATE_S + 10.0)
    assert taken(queue, 2, trainer="other") == ("a0", "a1")
    assert queue.window.head == 2


def test_head_waits_for_trainers_that_never_commit() -> None:
    """H passes W groups without a commit, or four batches if that is more; then it waits."""
    queue = make_queue("a" * 40, window=2)
    complete(queue, *(f"a{index}" for index in range(40)))
    batches = [take(queue, 2, trainer=f"t{number}") for number in range(12)]
    held = [batch for batch in batches if batch is not None]
    assert queue.window.head == 8
    assert max(queue.ledger.group(t).spec.index for b in held for t in b.task_ids) < 10
    queue.batches.commit(held[0].batch_id, step=1)
    assert queue.window.head == 10


def test_rewind_moves_the_head_back_to_the_first_untrained_group() -> None:
    """No group is assigned then, and none is in a batch."""
    queue = make_queue("aaaaaaaa", window=2)
    complete(queue, "a0", "a1", "a2", "a3", "a4")
    for step in (1, 2):
        batch = take(queue, 1)
        assert batch is not None
        queue.batches.commit(batch.batch_id, step=step)
    assert taken(queue, 2) == ("a2", "a3")
    assert taken(queue, 2, trainer="ahead") == ()
    assert queue.window.head == 5
    queue.batches.prepare_rewind(1)
    queue.batches.rewind(1)
    assert (queue.window.head, queue.window.edge) == (1, 3)
    assert taken(queue, 3) == ("a1", "a2", "a3")


def test_rewind_without_undone_steps_ends_open_batches() -> None:
    """H depends on durable states only, not on batches that were lost."""
    queue = make_queue("aaaa", window=2)
    complete(queue, "a0", "a1")
    assert taken(queue, 2) == ("a0", "a1")
    queue.batches.prepare_rewind(0)
    assert queue.batches.rewind(0) == 0
    assert queue.window.head == 0
    assert taken(queue, 2) == ("a0", "a1")


def test_new_leader_starts_from_durable_states() -> None:
    """Its H may be lower; the batch of a working trainer is held all the same."""
    queue = make_queue("aaaa", term=1, window=2)
    for index in range(4):
        queue.rollouts.complete(f"a{index}:0:0")
    assert queue.window.head == 0
    queue.batches.adopt("batch-0-3", ("a2", "a3"), now_s=0.0)
    assert taken(queue, 2) == ("a0", "a1")
    assert queue.window.head == 4


def test_adopted_batch_may_hold_groups_assigned_to_another() -> None:
    """No trainer has the assigned batch yet: it gets other groups."""
    queue = make_queue("aaaaa", term=1, window=3)
    for index in (0, 1):
        queue.rollouts.complete(f"a{index}:0:0")
    assert taken(queue, 3) == ()
    queue.batches.adopt("batch-0-0", ("a1",), now_s=0.0)
    for index in (2, 3):
        queue.rollouts.complete(f"a{index}:0:0")
    assert taken(queue, 3) == ("a0", "a2", "a3")


def test_tombstoned_group_leaves_the_open_batch() -> None:
    """Also a flat group: another group takes its place."""
    queue = make_queue("aaaa", window=2)
    complete(queue, "a0")
    assert taken(queue, 2) == ()
    queue.ledger.tombstone(queue.ledger.group("a0"), "teaches nothing")
    complete(queue, "a1", "a2")
    assert taken(queue, 2) == ("a1", "a2")


def test_assigned_group_of_an_unreachable_shard_is_replaced() -> None:
    """It comes first again once its shard answers."""
    queue = make_queue("", window=3)
    for index, shard in enumerate(("s0", "s1", "s1", "s1", "s1")):
        add(queue, f"a{index}", index, shard=shard)
    queue.rollouts.lease(runner_id="r", max_rollouts=9, now_s=0.0)
    complete(queue, "a0")
    assert taken(queue, 2) == ()
    queue.set_away(frozenset({"s0"}))
    complete(queue, "a1", "a2", "a3", "a4")
    assert taken(queue, 2) == ("a1", "a2")
    queue.set_away(frozenset())
    assert taken(queue, 2, trainer="other") == ("a0", "a3")


def test_groups_beyond_their_quota_wait_for_the_next_batch() -> None:
    """They stay visible, and hold H like any group that is not taken."""
    queue = make_queue("aaabab", window=4, domain_shares={"a": 1.0, "b": 1.0})
    complete(queue, "a0", "a1", "a2")
    assert taken(queue, 2) == ()
    assert queue.window.head == 1
    complete(queue, "b3")
    assert taken(queue, 2) == ("a0", "b3")
    assert queue.window.head == 1


def test_other_domains_fill_a_batch_until_the_short_domain_is_in_the_window() -> None:
    """Each group moves the window, and the batch waits for a domain that enters it. Groups that
    filled in too early are first in the next batch."""
    queue = make_queue("aaaabbbb", window=3, domain_shares={"a": 1.0, "b": 1.0})
    complete(queue, "a0", "a1", "a2", "a3")
    assert taken(queue, 4) == ()
    assert queue.window.head == 2, "its quota of two; b4 is inside now"
    complete(queue, "b4")
    assert taken(queue, 4) == ()
    assert queue.window.head == 3, "a2 filled in; b5 is inside now"
    complete(queue, "b5")
    batch = take(queue, 4)
    assert batch is not None
    assert batch.task_ids == ("a0", "a1", "b4", "b5")
    queue.batches.commit(batch.batch_id, step=1)
    complete(queue, "b6", "b7")
    assert taken(queue, 4) == ("a2", "a3", "b6", "b7")


def test_assigned_groups_do_not_hold_back_generation() -> None:
    """Under `window` admission, groups of the trainer are not ahead of it."""
    queue = make_queue("", window=1, concurrency=2, admission=GenerationLimit.WINDOW)
    for index in range(6):
        add(queue, f"a{index}", index)
    assert len(queue.rollouts.lease(runner_id="r", max_rollouts=9, now_s=0.0)) == 2
    complete(queue, "a0")
    assert taken(queue, 4) == ()
    assert [c.task_id for c in queue.rollouts.lease(runner_id="r", max_rollouts=9, now_s=0.0)] == [
        "a2"
    ]


def test_batch_waits_for_a_group_that_its_assignments_admit() -> None:
    """No batch is short because nothing could start before its groups were assigned."""
    queue = make_queue("", window=6, concurrency=2, admission=GenerationLimit.WINDOW)
    for index in range(6):
        add(queue, f"a{index}", index)
    queue.rollouts.lease(runner_id="r", max_rollouts=9, now_s=0.0)
    complete(queue, "a0", "a1")
    assert taken(queue, 4) == ()
    queue.rollouts.lease(runner_id="r", max_rollouts=9, now_s=0.0)
    complete(queue, "a2", "a3")
    assert taken(queue, 4) == ("a0", "a1", "a2", "a3")


def test_smaller_batch_gets_the_oldest_assigned_groups() -> None:
    """Several trainers share one open batch, for any sizes."""
    queue = make_queue("aaaaaa", window=4)
    complete(queue, "a0", "a1", "a3")
    assert taken(queue, 8, trainer="large") == ()
    assert taken(queue, 2, trainer="small") == ("a0", "a1")
    assert taken(queue, 1, trainer="smaller") == ("a3",)


def test_group_of_a_late_commit_leaves_the_open_batch() -> None:
    """A late commit names groups that are assigned again: they are removed, and trained once."""
    queue = make_queue("aaaa", window=4, batch_lease_s=10.0)
    complete(queue, "a0", "a1")
    late = take(queue, 2)
    assert late is not None
    queue.expire(LATE_S + 10.0)
    assert taken(queue, 3, trainer="other") == ()
    stored = queue.batches.prepare_commit(
        late.batch_id, step=1, task_ids=late.task_ids, now_s=LATE_S + 11.0
    )
    assert stored == ("a0", "a1")
    queue.batches.commit(late.batch_id, step=1)
    complete(queue, "a2", "a3")
    assert taken(queue, 2, trainer="other") == ("a2", "a3")
    with pytest.raises(NotFound):
        queue.batches.renew(late.batch_id, now_s=LATE_S)


@pytest.mark.parametrize("mode", Mode)
def test_window_keeps_no_memory_of_consumed_groups(mode: Mode) -> None:
    """Its memory follows the queued groups, in every mode; a rewind restores the undone groups."""
    queue = make_queue("a" * 40, mode=mode, batch_groups=4, window=8, max_staleness_p99=20.0)
    complete(queue, *(f"a{index}" for index in range(40)))
    step = 0
    while batch := take(queue, 4):
        step += 1
        queue.batches.commit(batch.batch_id, step=step)
    window = queue.window
    assert queue.ledger.totals().trained == 40
    assert not window._groups
    assert not any(window._complete.oldest(lane, 1) for lane in window._complete)
    queue.batches.prepare_rewind(step - 1)
    assert queue.batches.rewind(step - 1) == 4
    assert len(window._groups) == 4


def test_take_reads_only_the_groups_that_the_batch_needs() -> None:
    """A slow head ends, and thousands of groups enter the window: `take` reads as many as the batch
    needs, and the shown window is exact."""
    queue = make_queue("a" * 4000, window=2000, concurrency=4000)
    complete(queue, *(f"a{index}" for index in range(1, 4000)))
    for step in (1, 2, 3):
        batch = take(queue, 500)
        assert batch is not None
        queue.batches.commit(batch.batch_id, step=step)
    assert taken(queue, 500) == ()
    complete(queue, "a0")
    assert taken(queue, 500) == ("a0", *(f"a{index}" for index in range(1501, 2000)))
    window = queue.window
    assert window._edge - 2000 <= 256
    assert (window.head, window.edge) == (2000, 4000)
    assert queue.ledger.totals().complete_in_window == 2000


def test_late_group_below_the_head_keeps_the_window_counts_right() -> None:
    """The window restarts from it while a batch is leased."""
    queue = make_queue("", window=2)
    for index in (1, 2, 3, 4):
        add(queue, f"a{index}", index)
    queue.rollouts.lease(runner_id="r", max_rollouts=9, now_s=0.0)
    complete(queue, "a1", "a2", "a3")
    batch = take(queue, 3)
    assert batch is not None
    add(queue, "a0", 0)
    queue.rollouts.lease(runner_id="r", max_rollouts=9, now_s=0.0)
    complete(queue, "a0")
    assert taken(queue, 1, trainer="other") == ("a0",)
    assert (queue.window.head, queue.window.edge) == (4, 5)
    assert queue.window.inside(Phase.BATCHED) == 4
    queue.batches.commit(batch.batch_id, step=1)
    assert queue.window.inside(Phase.BATCHED) == 1


def test_status_counts_assigned_groups_as_complete() -> None:
    """An assigned group is in no batch yet."""
    queue = make_queue("aaa", window=2)
    complete(queue, "a0")
    assert taken(queue, 3) == ()
    assert queue.ledger.group("a0").phase is Phase.COMPLETE
    assert queue.ledger.totals().complete_in_window == 1
