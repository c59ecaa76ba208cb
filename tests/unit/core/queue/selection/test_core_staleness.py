"""The bound on staleness of the adaptive mode, kept in advance."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from forge.core.queue.admission import Mode, QueueSettings
from forge.core.queue.generation_queue import GenerationQueue
from forge.core.queue.groups import Group, GroupSpec, Phase
from forge.core.queue.selection.staleness import Deadlines
from forge.core.trajectory import TaskId

EVERYTHING = 1_000


def make_group(index: int, *, shard: str = "s") -> Group:
    spec = GroupSpec(task_id=TaskId(f"t{index}"), index=index, domain="a", shard=shard, size=1)
    return Group(spec)


def make_started(deadlines: Deadlines, *indices: int, complete: bool = False) -> list[Group]:
    groups = [make_group(index) for index in indices]
    for group in groups:
        group.phase = Phase.COMPLETE if complete else Phase.RUNNING
        deadlines.started(group)
    return groups


def train(deadlines: Deadlines, *groups: Group) -> None:
    for group in groups:
        deadlines.taken(group)
    deadlines.trained(groups)


def look(deadlines: Deadlines, size: int = 2, **changed: Any) -> tuple[list[int], bool]:
    asked: dict[str, Any] = {"batched": 0, "edge": EVERYTHING, "away": frozenset()}
    due = deadlines.due(size, **(asked | changed))
    return [group.spec.index for group in due.groups], due.lacking


def test_group_is_due_in_the_last_step_within_the_bound() -> None:
    """Started after step 0 with a bound of 3: the third batch must hold it."""
    deadlines = Deadlines(3, history=1000)
    make_started(deadlines, 0, complete=True)
    assert look(deadlines) == ([], False)
    train(deadlines)
    assert look(deadlines) == ([], False)
    assert look(deadlines, batched=2) == ([0], False), "the second batch is out already"
    train(deadlines)
    assert look(deadlines) == ([0], False)


def test_groups_beyond_the_last_batch_are_due_one_batch_earlier() -> None:
    """Five groups with two steps left, two to a batch: one cannot be in time in any order, and
    the batch before the last must be full of them."""
    deadlines = Deadlines(2, history=1000)
    make_started(deadlines, 0, 1, 2, complete=True)
    assert look(deadlines) == ([0], False)
    make_started(deadlines, 3, complete=True)
    make_started(deadlines, 4)
    due = deadlines.due(2, batched=0, edge=EVERYTHING, away=frozenset())
    assert [group.spec.index for group in due.groups] == [0], "the older half of it"
    assert [group.spec.index for group in due.among] == [0, 1, 2, 3], "and any of the next"
    assert not due.lacking


def test_batch_waits_for_due_groups_that_are_incomplete() -> None:
    """Four of four are due and three complete: the batch holds these, and no other group is
    chosen."""
    deadlines = Deadlines(1, history=1000)
    make_started(deadlines, 0, 1, 2, complete=True)
    make_started(deadlines, 3)
    due = deadlines.due(4, batched=0, edge=EVERYTHING, away=frozenset())
    assert [group.spec.index for group in due.groups] == [0, 1, 2]
    assert (due.among, due.lacking) == ([], True)


def test_batch_waits_for_due_groups_that_run() -> None:
    """Unless the pool shard is unreachable or the group is beyond the window."""
    deadlines = Deadlines(1, history=1000)
    make_started(deadlines, 7)
    assert look(deadlines) == ([], True)
    assert look(deadlines, away=frozenset({"s"})) == ([], False)
    assert look(deadlines, edge=7) == ([], False)


def test_one_trained_group_in_a_thousand_may_be_late() -> None:
    """The first hung group of a thousand delays no batch; the second one does."""
    deadlines = Deadlines(1, history=1000)
    for index in range(999):
        train(deadlines, *make_started(deadlines, index))
    hung = make_started(deadlines, 1000, 1001)
    assert look(deadlines, edge=2000) == ([], True)
    deadlines.gave_up(hung[1])
    train(deadlines, *make_started(deadlines, 999))
    assert look(deadlines, edge=2000) == ([], False)
    assert deadlines.staleness_p99 == 1
    make_started(deadlines, 1002)
    train(deadlines)
    assert look(deadlines, edge=2000) == ([], True)


def test_group_of_another_leader_is_due_at_once() -> None:
    """Its start is unknown, so its staleness is not counted."""
    deadlines = Deadlines(5, history=1000)
    group = make_group(3)
    group.phase = Phase.COMPLETE
    deadlines.came_back(group)
    assert look(deadlines) == ([3], False)
    train(deadlines, group)
    assert look(deadlines) == ([], False)
    assert deadlines.staleness_p99 == 0


def test_groups_a_fifo_would_have_trained_count_as_left_behind() -> None:
    """Groups 0 to 3 are of the first two batches: of them, those in no batch are behind the second
    one, the oldest first, and no more than a batch of them."""
    deadlines = Deadlines(100, history=1000)
    left = make_started(deadlines, *range(4))
    ahead = make_started(deadlines, *range(4, 12), complete=True)

    def behind(*picked: int, **changed: Any) -> list[int]:
        asked: dict[str, Any] = {"batched": 0, "edge": EVERYTHING, "away": frozenset()}
        found = deadlines.left_behind(2, picked, **(asked | changed))
        return [group.spec.index for group in found]

    assert behind(4, 5) == [0, 1]
    assert behind(0, 4) == [1]
    assert behind(1, 4, edge=0) == []
    assert behind(6, 7, away=frozenset({"s"})) == []
    train(deadlines, *ahead[:2])
    assert behind(6, 7) == [0, 1]
    assert behind(0, 1) == [2, 3]
    left[0].phase = Phase.BATCHED
    assert behind(6, 7, batched=1) == [1, 2]


def test_fifo_batch_overtakes_no_group() -> None:
    """Of the oldest groups in no batch, those that run count, up to the complete ones it needs."""
    deadlines = Deadlines(100, history=1000)
    groups = make_started(deadlines, 0, 1, 2, 3, 4, complete=True)
    visible: dict[str, Any] = {"edge": EVERYTHING, "away": frozenset()}
    groups[2].phase = Phase.RUNNING
    assert deadlines.overtaken(2, **visible) == 0
    assert deadlines.overtaken(3, **visible) == 1
    groups[0].phase = Phase.BATCHED
    assert deadlines.overtaken(2, **visible) == 1
    groups[3].phase = Phase.RUNNING
    assert deadlines.overtaken(2, **visible) == 2
    assert deadlines.overtaken(2, edge=2, away=frozenset()) == 2, "too few are complete"


@settings(max_examples=60, deadline=None)
@given(
    batch=st.integers(1, 5),
    bound=st.integers(1, 6),
    concurrency=st.integers(1, 24),
    order=st.lists(st.floats(0, 1, exclude_max=True), min_size=60, max_size=250),
)
def test_staleness_bound_holds_for_every_order_of_completion(
    batch: int, bound: int, concurrency: int, order: list[float]
) -> None:
    """With full batches no group is staler than the bound, none beyond the edge is leased, the
    window keeps its announced groups, and a batch that a FIFO would return is not delayed."""
    rules = QueueSettings(
        concurrency=concurrency, mode=Mode.ADAPTIVE, batch_groups=batch, max_staleness_p99=bound
    )
    queue = GenerationQueue(rules)
    for index in range(len(order) + concurrency):
        queue.add_group(make_group(index), now_s=0.0)
    window, step, announced = queue.window, 0, 0
    started: dict[str, int] = {}
    running: list[str] = []
    for now_s, choice in enumerate(order):
        for claim in queue.rollouts.lease(runner_id="r", max_rollouts=999, now_s=0.0):
            started[claim.task_id] = step
            running.append(claim.task_id)
        if not running:
            break
        done = running.pop(int(choice * len(running)))
        queue.rollouts.complete(f"{done}:0:0", now_s=float(now_s))
        # At time 0 the queue still counts as growing: no batch is ever short.
        while taken := queue.take_batch(trainer_id="t", max_groups=batch, now_s=0.0):
            edge = window.edge
            assert edge >= announced
            assert edge >= window.head + min(window.size, len(order) + concurrency - window.head)
            announced = edge
            step += 1
            for task_id in taken.task_ids:
                assert step - started[task_id] <= bound
                assert int(task_id[1:]) < edge
            queue.batches.commit(taken.batch_id, step=step)
        groups = (queue.ledger.group(f"t{index}") for index in range(window.head, window.edge))
        oldest = [group.phase for group in groups if not group.phase.consumed][:batch]
        assert oldest.count(Phase.COMPLETE) < batch
