"""The modes of the queue, and what an operator may do to it."""

from __future__ import annotations

from typing import Any

import pytest

from forge.core.queue.activity import Activity
from forge.core.queue.admission import GenerationLimit, Mode, QueueSettings
from forge.core.queue.generation_queue import GenerationQueue
from forge.core.queue.groups import Group, GroupSpec, Phase
from forge.core.queue.selection.adaptive import Adaptive
from forge.core.queue.window.domain_shares import DomainShares
from forge.core.queue.window.window import Window
from forge.core.trajectory import TaskId


def make_queue(domains: str, **settings: Any) -> GenerationQueue:
    """One queued group per letter, of the domain the letter names: task `<letter><index>`."""
    defaults: dict[str, Any] = {
        "concurrency": 64,
        "admission": GenerationLimit.RUNNING,
        "short_batch_after_s": 5.0,
    }
    queue = GenerationQueue(QueueSettings(**(defaults | settings)))
    for index, domain in enumerate(domains):
        spec = GroupSpec(
            task_id=TaskId(f"{domain}{index}"), index=index, domain=domain, shard="s0", size=1
        )
        queue.add_group(Group(spec), now_s=0.0)
    return queue


def lease(queue: GenerationQueue, count: int = 99) -> list[str]:
    claims = queue.rollouts.lease(runner_id="r", max_rollouts=count, now_s=0.0)
    return [str(claim.task_id) for claim in claims]


def complete(queue: GenerationQueue, *task_ids: str, now_s: float = 0.0) -> None:
    for task_id in task_ids:
        assert queue.rollouts.complete(f"{task_id}:0:0", now_s=now_s)


def commit_next(queue: GenerationQueue, size: int, *, now_s: float) -> None:
    """Take the next batch and commit it as step 1."""
    batch = queue.take_batch(trainer_id="t", max_groups=size, now_s=now_s)
    assert batch is not None
    queue.batches.commit(batch.batch_id, step=1)


def take(queue: GenerationQueue, size: int, *, now_s: float = 0.0) -> tuple[str, ...]:
    batch = queue.take_batch(trainer_id="t", max_groups=size, now_s=now_s)
    return batch.task_ids if batch else ()


def test_fifo_batch_is_the_next_groups_of_the_queue() -> None:
    """Even if it is smaller than a full one."""
    queue = make_queue("aaaa", mode=Mode.FIFO, batch_groups=4)
    lease(queue)
    complete(queue, "a1", "a2")
    assert take(queue, 2) == ()
    complete(queue, "a0")
    assert take(queue, 2) == ("a0", "a1")


def test_fifo_returns_a_short_batch_at_the_end_of_the_queue() -> None:
    """The last groups are a batch if none follows."""
    queue = make_queue("aaa", mode=Mode.FIFO, batch_groups=4)
    lease(queue)
    complete(queue, "a0", "a1", "a2")
    assert take(queue, 4, now_s=1.0) == ()
    assert take(queue, 4, now_s=6.0) == ("a0", "a1", "a2")


def test_greedy_mode_sees_every_group() -> None:
    """The head delays no group, however far behind it."""
    queue = make_queue("a" * 60, mode=Mode.GREEDY)
    lease(queue)
    complete(queue, "a58", "a59")
    assert take(queue, 2) == ("a58", "a59")
    assert queue.window.width == 0


def test_narrowed_window_keeps_its_announced_groups() -> None:
    """The edge waits until the head is close enough; it never moves back."""
    window = Window(size=4, shares=DomainShares({}))
    groups = []
    for index in range(8):
        spec = GroupSpec(task_id=TaskId(str(index)), index=index, domain="a", shard="s", size=1)
        groups.append(Group(spec))
        window.add(groups[-1])
    window.resize(2)
    assert (window.head, window.edge, window.width) == (0, 4, 4)
    for group in groups[:3]:
        group.phase = Phase.TOMBSTONED
        window.moved(group, Phase.QUEUED)
    assert (window.head, window.edge, window.width) == (3, 5, 2)


def test_pause_leases_nothing_and_revokes_nothing() -> None:
    """Leased rollouts and batches continue; a resume restores everything."""
    queue = make_queue("aaaa", mode=Mode.GREEDY)
    lease(queue, 3)
    complete(queue, "a0", "a1")
    assert take(queue, 1) == ("a0",)
    queue.set_activity(Activity.PAUSED)
    assert lease(queue) == []
    assert take(queue, 1) == ("a0",), "what the trainer holds already"
    assert queue.take_batch(trainer_id="other", max_groups=1, now_s=0.0) is None
    assert queue.rollouts.renew("a2:0:0", now_s=0.0)
    complete(queue, "a2")
    queue.set_activity(Activity.RUNNING)
    assert lease(queue) == ["a3"]


def test_drain_completes_running_groups_and_starts_none() -> None:
    """A retry is still leased, and the last batch is short at once."""
    queue = make_queue("aaaa", mode=Mode.GREEDY, retry_backoff_s=0.0)
    lease(queue, 2)
    queue.set_activity(Activity.DRAINING)
    assert lease(queue) == []
    complete(queue, "a0")
    assert take(queue, 4) == ()
    assert queue.rollouts.fail("a1:0:0", reason="died", permanent=False, now_s=0.0)
    assert lease(queue) == ["a1"]
    assert queue.rollouts.complete("a1:0:1")
    assert take(queue, 4) == ("a0", "a1")


def test_domain_at_its_limit_delays_no_other_domain() -> None:
    """Its groups are passed over, and keep their places."""
    queue = make_queue("aaab", mode=Mode.GREEDY, domain_limits={"a": 1})
    assert lease(queue) == ["a0", "b3"]
    complete(queue, "a0")
    assert lease(queue) == ["a1"]


def test_adaptive_mode_starts_groups_that_can_be_trained_in_time() -> None:
    """At most S B groups are started and untrained, whether they run, are complete or in a
    batch."""
    queue = make_queue("a" * 64, mode=Mode.ADAPTIVE, batch_groups=4, max_staleness_p99=5.5)
    names = lease(queue)
    assert len(names) == 20, "five steps of four groups"
    complete(queue, *names)
    assert lease(queue) == []
    batch = queue.take_batch(trainer_id="t", max_groups=4, now_s=0.0)
    assert batch
    assert lease(queue) == []
    queue.batches.commit(batch.batch_id, step=1)
    assert len(lease(queue)) == 4
    assert queue.window.width == 40


def test_adaptive_mode_keeps_half_a_batch_back_in_a_long_queue() -> None:
    """After 50 steps since the queue was last empty. All queued groups start if they fit into S
    batches."""
    queue = make_queue("a" * 240, mode=Mode.ADAPTIVE, batch_groups=4, max_staleness_p99=5.0)
    adaptive = queue.selection
    assert isinstance(adaptive, Adaptive)
    for step in range(1, 60):
        names = lease(queue)
        assert len(names) == {1: 20, 51: 2, 56: 6}.get(step, 4 if step < 56 else 0)
        assert adaptive.open_limit == (18 if 50 < step <= 56 else 20)
        complete(queue, *names)
        batch = queue.take_batch(trainer_id="t", max_groups=4, now_s=0.0)
        assert batch
        queue.batches.commit(batch.batch_id, step=step)


def test_adaptive_mode_chooses_half_of_a_due_batch() -> None:
    """Two batches must hold all eight: the first has the oldest two, and its share of slow
    groups."""
    queue = make_queue("a" * 8, mode=Mode.ADAPTIVE, batch_groups=4, max_staleness_p99=2.0)
    names = lease(queue)
    complete(queue, *names[:4], now_s=1.0)
    complete(queue, *names[4:], now_s=9.0)
    assert take(queue, 4, now_s=9.0) == ("a0", "a1", "a4", "a5")


def test_adaptive_due_batch_takes_no_younger_group() -> None:
    """The head was unreachable and started late: it has time, the groups that overtook it do
    not."""
    queue = make_queue("", mode=Mode.ADAPTIVE, batch_groups=4, max_staleness_p99=2.0)
    for index in range(16):
        shard = "s0" if index else "gone"
        spec = GroupSpec(task_id=TaskId(f"a{index}"), index=index, domain="a", shard=shard, size=1)
        queue.add_group(Group(spec), now_s=0.0)
    queue.set_away(frozenset({"gone"}))
    complete(queue, *lease(queue))
    assert take(queue, 4) == ("a1", "a2", "a3", "a4")
    commit_next(queue, 4, now_s=0.0)
    queue.set_away(frozenset())
    complete(queue, *lease(queue))
    assert queue.ledger.group("a0").phase is Phase.COMPLETE
    assert take(queue, 2) == ("a5", "a6")


def test_adaptive_mode_starts_a_whole_batch_under_any_bound() -> None:
    """With a bound of one step, generation and training alternate without a halt."""
    queue = make_queue("a" * 64, mode=Mode.ADAPTIVE, batch_groups=8, max_staleness_p99=1.0)
    for _ in range(3):
        names = lease(queue)
        assert len(names) == 8
        complete(queue, *names)
        assert take(queue, 8) == tuple(names)
        assert lease(queue) == []
        commit_next(queue, 8, now_s=0.0)


def test_adaptive_batch_after_a_start_waits_for_slow_groups() -> None:
    """The groups that complete first are short: no batch is taken before slow ones have ended."""
    queue = make_queue("a" * 64, mode=Mode.ADAPTIVE, batch_groups=8, max_staleness_p99=20.0)
    names = lease(queue, 32)
    short, slow = names[1::2], names[0::2]
    complete(queue, *short, now_s=1.0)
    assert take(queue, 8, now_s=1.0) == ()
    complete(queue, *slow, now_s=9.0)
    assert take(queue, 8, now_s=9.0) == tuple(names[:8]), "half of it slow, as in the queue"


def test_adaptive_batch_waits_no_longer_than_a_fifo() -> None:
    """After a change of tasks no batch has the earlier mix: the next groups are taken."""
    queue = make_queue("a" * 64, mode=Mode.ADAPTIVE, batch_groups=8, max_staleness_p99=20.0)
    names = lease(queue)
    complete(queue, *names[:8], now_s=1.0)
    assert take(queue, 8, now_s=1.0) == tuple(names[:8])
    commit_next(queue, 8, now_s=1.0)
    complete(queue, *names[10:20], now_s=50.0)
    assert take(queue, 8, now_s=50.0) == ()
    complete(queue, names[9], now_s=50.0)
    assert take(queue, 8, now_s=50.0) == tuple(names[9:17]), "it may leave one behind that hangs"


def test_adaptive_window_follows_the_size_of_the_last_batch() -> None:
    """A trainer that takes fewer groups than configured sees fewer beyond the head."""
    queue = make_queue("a" * 32, mode=Mode.ADAPTIVE, batch_groups=4, max_staleness_p99=2.0)
    assert queue.window.edge == 16
    complete(queue, *lease(queue))
    batch = queue.take_batch(trainer_id="t", max_groups=1, now_s=99.0)
    assert batch
    queue.batches.commit(batch.batch_id, step=1)
    assert (queue.window.head, queue.window.edge) == (1, 16)


def test_batch_does_not_wait_for_groups_behind_evaluations() -> None:
    """A group that may not start does not complete: the batch is short."""
    queue = make_queue(
        "aaaa", mode=Mode.FIFO, batch_groups=4, concurrency=3, admission=GenerationLimit.WINDOW
    )
    complete(queue, *lease(queue))
    spec = GroupSpec(task_id=TaskId("e"), index=0, domain="a", shard="s0", size=1, evaluation=True)
    queue.add_group(Group(spec), now_s=0.0)
    assert lease(queue) == ["e"]
    assert take(queue, 4, now_s=99.0) == ("a0", "a1", "a2")


@pytest.mark.parametrize("held", [{"concurrency": 2}, {"domain_limits": {"a": 2}}])
def test_batch_waits_while_evaluations_have_all_places(held: dict[str, Any]) -> None:
    """They end, and then the batch can be filled."""
    queue = make_queue("aaaa", window=4, admission=GenerationLimit.RUNNING, **held)
    complete(queue, *lease(queue))
    for index in range(2):
        spec = GroupSpec(
            task_id=TaskId(f"e{index}"),
            index=index,
            domain="a",
            shard="s0",
            size=1,
            evaluation=True,
        )
        queue.add_group(Group(spec), now_s=0.0)
    assert lease(queue) == ["e0", "e1"]
    assert take(queue, 4, now_s=99.0) == ()


def make_outage(**settings: Any) -> GenerationQueue:
    """Twelve groups, the first eight of them on a pool shard that is away."""
    queue = make_queue("", **settings)
    for index in range(12):
        shard = "gone" if index < 8 else "s0"
        spec = GroupSpec(task_id=TaskId(f"a{index}"), index=index, domain="a", shard=shard, size=1)
        queue.add_group(Group(spec), now_s=0.0)
    queue.set_away(frozenset({"gone"}))
    return queue


@pytest.mark.parametrize(
    "settings",
    [
        {"mode": Mode.WINDOWED, "window": 2},
        {"mode": Mode.FIFO, "batch_groups": 2},
        {"mode": Mode.ADAPTIVE, "batch_groups": 2, "max_staleness_p99": 2.0},
    ],
)
def test_head_starts_although_groups_overtook_it_in_an_outage(settings: dict[str, Any]) -> None:
    """Complete groups beyond the window wait for the head, so the head must not wait for them."""
    queue = make_outage(concurrency=4, admission=GenerationLimit.WINDOW, **settings)
    ahead = lease(queue)
    assert "a8" in ahead
    complete(queue, *ahead)
    assert lease(queue) == []
    queue.set_away(frozenset())
    assert lease(queue)[:2] == ["a0", "a1"]
    complete(queue, "a0", "a1")
    assert take(queue, 2) == ("a0", "a1")


def test_adaptive_mode_keeps_its_bound_after_an_outage() -> None:
    """The groups that overtook the head are in the window and can be trained: the head waits."""
    queue = make_outage(concurrency=64, mode=Mode.ADAPTIVE, batch_groups=2, max_staleness_p99=4.0)
    complete(queue, *lease(queue))
    queue.set_away(frozenset())
    assert lease(queue) == ["a0", "a1", "a2", "a3"], "eight of four steps, with four ahead"


def make_priorities(*priorities: int, **settings: Any) -> GenerationQueue:
    """A group for each: task `a<index>`."""
    queue = make_queue("", **settings)
    for index, priority in enumerate(priorities):
        spec = GroupSpec(
            task_id=TaskId(f"a{index}"),
            index=index,
            domain="a",
            shard="s0",
            size=1,
            priority=priority,
        )
        queue.add_group(Group(spec), now_s=0.0)
    return queue


def test_priority_is_the_number_of_groups_that_a_group_passes() -> None:
    """Of two groups in one place the older starts first."""
    queue = make_priorities(0, 0, 0, 2, 3, 0, 1, concurrency=64, window=10)
    assert lease(queue) == ["a0", "a3", "a4", "a1", "a2", "a6", "a5"]


def test_priority_passes_at_most_one_window_of_groups() -> None:
    """For any priorities, every group starts in the end, and the head's batch fills."""
    queue = make_priorities(
        0, *[10_000] * 9, window=3, concurrency=4, admission=GenerationLimit.WINDOW
    )
    assert lease(queue, 2) == ["a1", "a2"]
    complete(queue, "a1", "a2")
    assert take(queue, 2) == ("a1", "a2"), "what started before the head is inside the window"
    commit_next(queue, 2, now_s=0.0)
    assert lease(queue, 1) == ["a0"], "two passed it, and no more"


def test_priority_does_not_starve_the_head_of_a_fifo() -> None:
    """A batch begins with the head, so the head must start."""
    queue = make_priorities(
        0, 1, 2, mode=Mode.FIFO, batch_groups=3, concurrency=2, admission=GenerationLimit.WINDOW
    )
    assert lease(queue) == ["a1", "a0"]
    complete(queue, "a0", "a1")
    assert take(queue, 2) == ("a0", "a1")


def test_priority_does_not_change_batches() -> None:
    """A batch is in queue order, and no group beyond the window is leased."""
    queue = make_priorities(0, 0, 0, 0, 0, 1, window=4, mode=Mode.WINDOWED)
    lease(queue)
    complete(queue, "a0", "a5", "a1")
    assert take(queue, 2) == ("a0", "a1")
