"""What a leader answers while a pool shard has not been read: wait; never that it is unknown."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from forge.core.errors import Unavailable
from services.scheduler.state.messages.batches import CommitBatch, RenewBatch, Rewind, TakeBatch
from services.scheduler.state.messages.groups import ListTagged, Submit
from services.scheduler.state.messages.rollouts import (
    AttemptReport,
    FindUnknown,
    LeaseRollouts,
    RenewRollouts,
    SettleRollouts,
)
from services.scheduler.state.messages.term import GetStatus, NoteHead, SetAway
from tests.support.scheduler.cluster import make_task
from tests.support.scheduler.term import ASK_S, FakeShards, TermActors

AWAY = frozenset({"s1"})


async def submit(term: TermActors, *task_ids: str) -> None:
    tasks = {task_id: make_task(task_id) for task_id in task_ids}
    await term.submissions.ask(Submit(tasks=tasks), timeout_s=ASK_S)


@pytest.fixture
async def unread(term: TermActors) -> TermActors:
    """A term with one known group that is complete, and a shard that has not been read."""
    term.shards.shards = {"s0"}
    await submit(term, "a")
    ask = LeaseRollouts(runner_id="r", max_rollouts=1)
    (grant,) = await (await term.queue.ask(ask, timeout_s=ASK_S))
    term.shards.seal(grant.trajectory_id)
    summary = term.shards.stored[grant.trajectory_id]
    report = AttemptReport(trajectory_id=grant.trajectory_id, summary=summary)
    await term.queue.ask(SettleRollouts(reports=[report]), timeout_s=ASK_S)
    await term.queue.ask(SetAway(shards=AWAY, unread=AWAY), timeout_s=ASK_S)
    return term


QUESTIONS = [
    pytest.param("queue", lambda: FindUnknown(trajectory_ids=["x:0:0"]), id="a report"),
    pytest.param("queue", lambda: ListTagged(tag=""), id="a list"),
    pytest.param("queue", lambda: RenewBatch(batch_id="batch-0-7"), id="a batch"),
    pytest.param(
        "queue",
        lambda: TakeBatch(trainer_id="t", max_groups=1, held={"b": ["a", "x"]}),
        id="a held batch",
    ),
    pytest.param(
        "commits",
        lambda: CommitBatch(batch_id="batch-0-0", step=1, task_ids=["a", "x"]),
        id="a commit",
    ),
    pytest.param("commits", lambda: Rewind(step=0), id="a rewind"),
    pytest.param("submissions", lambda: Submit(tasks={"x": make_task("x")}), id="a new task"),
]


@pytest.mark.parametrize(("actor", "question"), QUESTIONS)
async def test_calls_wait_for_groups_that_may_be_on_an_unread_shard(
    unread: TermActors, actor: str, question: Callable[[], object]
) -> None:
    """If they were unknown, a trainer would discard its step, and a runner its rollout."""
    with pytest.raises(Unavailable, match="pool shard s1, which is awaited"):
        await getattr(unread, actor).ask(question(), timeout_s=ASK_S)


async def test_answer_is_final_once_the_shard_is_read(unread: TermActors) -> None:
    """A group that it does not have either is unknown."""
    await unread.queue.ask(SetAway(shards=frozenset()), timeout_s=ASK_S)
    find = FindUnknown(trajectory_ids=["x:0:0"])
    answer = await unread.queue.ask(find, timeout_s=ASK_S)
    assert answer == {"x:0:0": "task_id 'x' is not in the queue"}


async def test_known_groups_continue_while_a_shard_is_unread(
    unread: TermActors, shards: FakeShards
) -> None:
    """Batches of reachable shards are leased and committed; claims are kept."""
    take = TakeBatch(trainer_id="t", max_groups=1)
    batch = await (await unread.queue.ask(take, timeout_s=ASK_S))
    commit = CommitBatch(batch_id=batch.batch_id, step=1, task_ids=["a"])
    await unread.commits.ask(commit, timeout_s=ASK_S)
    await submit(unread, "a")
    lost = await unread.queue.ask(RenewRollouts(lease_ids=["x:0:0"]), timeout_s=ASK_S)
    assert lost == ()
    status = await unread.queue.ask(GetStatus(), timeout_s=ASK_S)
    assert (status.trained, list(status.shards_away)) == (1, ["s1"])


async def test_term_record_bounds_the_head(term: TermActors) -> None:
    """It follows the head, and a rewind lowers it before the first group is undone."""
    await submit(term, "a", "b")
    ask = LeaseRollouts(runner_id="r", max_rollouts=2)
    grants = await (await term.queue.ask(ask, timeout_s=ASK_S))
    for grant in grants:
        term.shards.seal(grant.trajectory_id)
    reports = [
        AttemptReport(trajectory_id=g.trajectory_id, summary=term.shards.stored[g.trajectory_id])
        for g in grants
    ]
    await term.queue.ask(SettleRollouts(reports=reports), timeout_s=ASK_S)
    batch = await (await term.queue.ask(TakeBatch(trainer_id="t", max_groups=1), timeout_s=ASK_S))
    await term.commits.ask(NoteHead(), timeout_s=ASK_S)
    assert term.record.fields["head"] == 0, "what is only handed out is not consumed"
    commit = CommitBatch(batch_id=batch.batch_id, step=1, task_ids=["a"])
    await term.commits.ask(commit, timeout_s=ASK_S)
    await term.commits.ask(NoteHead(), timeout_s=ASK_S)
    assert term.record.fields["head"] == 1
    await term.commits.ask(Rewind(step=0), timeout_s=ASK_S)
    assert term.record.fields["head"] == 0
