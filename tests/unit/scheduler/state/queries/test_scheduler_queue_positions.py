"""GetQueue: positions of the training queue, for viewers."""

from __future__ import annotations

from typing import Any

from forge.v1 import scheduler_pb2 as pb
from services.scheduler.state.messages.batches import CommitBatch, TakeBatch
from services.scheduler.state.messages.groups import Submit
from services.scheduler.state.messages.rollouts import AttemptReport, LeaseRollouts, SettleRollouts
from services.scheduler.state.queries.queue_positions import GetQueue
from tests.support.scheduler.cluster import make_task
from tests.support.scheduler.term import ASK_S, TermActors


async def positions(term: TermActors, **asked: Any) -> pb.GetQueueResponse:
    ask = {"first_index": None, "before_head": 0, "positions": 100} | asked
    answer: pb.GetQueueResponse = await term.queue.ask(GetQueue(**ask), timeout_s=ASK_S)
    return answer


async def settle(term: TermActors, trajectory_id: str, *, error: str = "") -> None:
    if not error:
        term.shards.seal(trajectory_id)
    report = AttemptReport(
        trajectory_id=trajectory_id,
        summary=term.shards.stored.get(trajectory_id),
        error=error,
        permanent=bool(error),
    )
    await term.queue.ask(SettleRollouts(reports=[report]), timeout_s=ASK_S)


async def queue_of_every_phase(term: TermActors) -> None:
    """Trained, tombstoned, batched, complete, running, queued; and one that is evaluated."""
    names = ("trained", "dropped", "batched", "complete", "running", "queued")
    tasks = [*(make_task(name) for name in names), make_task("held-out", evaluation=True)]
    for task in tasks[:5]:
        await term.submissions.ask(Submit(tasks={task.task_id: task}), timeout_s=ASK_S)
    ask = LeaseRollouts(runner_id="r", max_rollouts=5)
    assert len(await (await term.queue.ask(ask, timeout_s=ASK_S))) == 5
    for task in tasks[5:]:
        await term.submissions.ask(Submit(tasks={task.task_id: task}), timeout_s=ASK_S)
    await settle(term, "dropped:0:0", error="bad task")
    for name in ("trained", "batched"):
        await settle(term, f"{name}:0:0")
        take = TakeBatch(trainer_id=name, max_groups=1)
        batch = await (await term.queue.ask(take, timeout_s=ASK_S))
        if name == "trained":
            commit = CommitBatch(batch_id=batch.batch_id, step=7, task_ids=["trained"])
            await term.commits.ask(commit, timeout_s=ASK_S)
    await settle(term, "complete:0:0")


async def test_queue_has_the_phase_of_every_position(term: TermActors) -> None:
    """Evaluation groups have no position in it."""
    await queue_of_every_phase(term)
    found = await positions(term, first_index=0)
    assert list(found.phases) == [
        pb.QUEUE_PHASE_TRAINED,
        pb.QUEUE_PHASE_TOMBSTONED,
        pb.QUEUE_PHASE_BATCHED,
        pb.QUEUE_PHASE_COMPLETE,
        pb.QUEUE_PHASE_RUNNING,
        pb.QUEUE_PHASE_QUEUED,
    ]
    assert (found.first_index, found.next_index, found.edge) == (0, 6, 6)
    assert not found.groups


async def test_queue_begins_before_the_head(term: TermActors) -> None:
    """Without a first position; a range beyond the queue is empty."""
    await queue_of_every_phase(term)
    head = (await positions(term)).head
    assert head > 0
    assert (await positions(term)).first_index == head
    assert (await positions(term, before_head=1, positions=2)).first_index == head - 1
    assert (await positions(term, before_head=100)).first_index == 0
    beyond = await positions(term, first_index=50)
    assert (beyond.first_index, beyond.phases) == (50, b"")


async def test_details_name_rollouts_steps_and_reasons(term: TermActors) -> None:
    """For the view of one group."""
    await queue_of_every_phase(term)
    groups = (await positions(term, first_index=0, details=True)).groups
    by_task = {group.task_id: group for group in groups}
    assert [group.queue_index for group in groups] == [0, 1, 2, 3, 4, 5]
    assert by_task["trained"].step == 7
    assert by_task["trained"].sealed_trajectory_ids == ["trained:0:0"]
    assert "bad task" in by_task["dropped"].reason
    assert by_task["batched"].batch_id
    running = by_task["running"]
    assert (running.leased, running.sealed, running.group_size) == (1, 0, 1)
    assert running.open_trajectory_ids == ["running:0:0"]
    assert not by_task["queued"].open_trajectory_ids


async def test_settled_group_that_left_memory_is_gone(term: TermActors) -> None:
    """The pool alone has it; its position stays."""
    await queue_of_every_phase(term)
    term.state.queue.ledger.forget(most=0)
    phases = (await positions(term, first_index=0)).phases
    assert phases[1] == pb.QUEUE_PHASE_GONE
    assert phases[3] == pb.QUEUE_PHASE_COMPLETE
