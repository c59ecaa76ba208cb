"""Groups that were settled long ago: they leave memory, and nobody is answered otherwise."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from forge.core.errors import FailedPrecondition, InvalidArgument, NotFound, Unavailable
from forge.v1 import common_pb2
from services.scheduler import messages as m
from services.scheduler.listing import list_groups
from tests.support.scheduler_cluster import make_task
from tests.support.scheduler_term import ASK_S, Clock, FakeShards, TermActors

GROUPS = 12


@pytest_asyncio.fixture
async def term(shards: FakeShards, clock: Clock) -> AsyncIterator[TermActors]:
    """It holds two settled groups at most, and the groups of the last step."""
    shards.tells_all = True
    actors = TermActors(shards, clock, most_settled=2)
    await actors.start()
    yield actors
    await actors.system.stop()


async def submit(term: TermActors, *tasks: common_pb2.Task) -> int:
    ask = m.Submit(tasks={task.task_id: task for task in tasks})
    return int(await term.registrar.ask(ask, timeout_s=ASK_S))


async def seal_next(term: TermActors) -> list[str]:
    future = await term.queue.ask(m.LeaseRollouts(runner_id="r", max_rollouts=100), timeout_s=ASK_S)
    ids = [grant.trajectory_id for grant in await future]
    for trajectory_id in ids:
        term.shards.seal(trajectory_id)
    await report(term, *ids)
    return ids


async def report(term: TermActors, *ids: str) -> None:
    by_shard = await term.queue.ask(m.LocateRollouts(trajectory_ids=ids), timeout_s=ASK_S)
    found = await term.shards.summaries(by_shard)
    reports = [m.Report(trajectory_id=each, summary=found.get(each)) for each in ids]
    await term.queue.ask(m.SettleRollouts(reports=reports), timeout_s=ASK_S)


async def train(term: TermActors, *, groups: int = GROUPS) -> list[m.CommitBatch]:
    """Groups t0, t1 and on, each by a step of its own; the commits."""
    commits = []
    for step in range(1, groups + 1):
        await submit(term, make_task(f"t{step - 1}", tag="odd" if step % 2 == 0 else ""))
        await seal_next(term)
        take = m.TakeBatch(trainer_id="t", max_groups=1)
        batch = await (await term.queue.ask(take, timeout_s=ASK_S))
        ids = [view.record.task.task_id for view in batch.groups]
        commits.append(m.CommitBatch(batch_id=batch.batch_id, step=step, task_ids=ids))
        await term.ledger.ask(commits[-1], timeout_s=ASK_S)
    return commits


async def listed(term: TermActors, tag: str = "") -> list[str]:
    return [
        view.record.task.task_id
        async for part in list_groups(term.queue, term.shards, tag)
        for view in part
    ]


async def counts(term: TermActors) -> tuple[int, ...]:
    status = await term.queue.ask(m.GetStatus(), timeout_s=ASK_S)
    return status.accepted, status.trained, status.tombstoned, status.pending


async def test_memory_does_not_grow_with_what_was_trained_on(term: TermActors) -> None:
    """Of all groups two are held; the books have every one."""
    await train(term)
    assert len(term.state.catalog.tagged("")) == term.state.queue.books.held() == 2
    assert await counts(term) == (GROUPS, GROUPS, 0, 0)


async def test_memory_does_not_grow_with_what_was_given_up(term: TermActors) -> None:
    """Nor with what was evaluated."""
    for number in range(GROUPS):
        await submit(term, make_task(f"t{number}"), make_task(f"e{number}", evaluation=True))
        await seal_next(term)
        take = m.TakeBatch(trainer_id="t", max_groups=1)
        batch = await (await term.queue.ask(take, timeout_s=ASK_S))
        release = m.ReleaseBatch(batch_id=batch.batch_id, reason="gone")
        await term.ledger.ask(release, timeout_s=ASK_S)
    assert len(term.state.catalog.tagged("")) == term.state.queue.books.held() == 2
    assert await counts(term) == (GROUPS, 0, GROUPS, 0)


async def test_duplicate_of_a_forgotten_group_is_answered_as_ever(
    term: TermActors, shards: FakeShards
) -> None:
    """Known by id, strict about content, and without the pool, which may be away."""
    await train(term)
    shards.down |= {"s0", "s1"}
    assert await submit(term, make_task("t0")) == 0
    with pytest.raises(InvalidArgument, match="'t0' was submitted before with different content"):
        await submit(term, make_task("t0", domain="qa"))


async def test_late_word_of_a_forgotten_group_is_heard(term: TermActors) -> None:
    """A report changes nothing, and a claim is lost, as for a group that is over and held; a task
    that never was is not known."""
    await train(term)
    await report(term, "t0:0:0", "t0:0:7")
    renew = m.RenewRollouts(lease_ids=["t0:0:0", "t11:0:0"])
    assert await term.queue.ask(renew, timeout_s=ASK_S) == ("t0:0:0", "t11:0:0")
    assert await counts(term) == (GROUPS, GROUPS, 0, 0)
    with pytest.raises(NotFound):
        await report(term, "other:0:0")


async def test_repeated_commit_of_forgotten_groups_is_done(term: TermActors) -> None:
    """By the step that made it; another step is refused."""
    first, *_ = await train(term)
    await term.ledger.ask(first, timeout_s=ASK_S)
    other = m.CommitBatch(batch_id=first.batch_id, step=5, task_ids=first.task_ids)
    with pytest.raises(FailedPrecondition, match="committed by step 1"):
        await term.ledger.ask(other, timeout_s=ASK_S)
    assert await counts(term) == (GROUPS, GROUPS, 0, 0)


async def test_rewind_takes_back_forgotten_groups(term: TermActors) -> None:
    """They are read from the pool, and trained on again."""
    await train(term)
    assert await term.ledger.ask(m.Rewind(step=3), timeout_s=ASK_S) == GROUPS - 3
    assert await counts(term) == (GROUPS, 3, 0, GROUPS - 3)
    taken = await (
        await term.queue.ask(m.TakeBatch(trainer_id="t", max_groups=GROUPS), timeout_s=ASK_S)
    )
    assert [view.record.task.task_id for view in taken.groups] == [f"t{n}" for n in range(3, 12)]
    commit = m.CommitBatch(batch_id=taken.batch_id, step=4, task_ids=())
    await term.ledger.ask(commit, timeout_s=ASK_S)
    assert await counts(term) == (GROUPS, GROUPS, 0, 0)


async def test_rewind_that_cannot_read_the_pool_takes_nothing_back(
    term: TermActors, shards: FakeShards
) -> None:
    """It is UNAVAILABLE, and whole once the pool answers."""
    await train(term)
    shards.down |= {"s0", "s1"}
    with pytest.raises(Unavailable):
        await term.ledger.ask(m.Rewind(step=3), timeout_s=ASK_S)
    assert await counts(term) == (GROUPS, GROUPS, 0, 0)
    shards.down.clear()
    assert await term.ledger.ask(m.Rewind(step=3), timeout_s=ASK_S) == GROUPS - 3


async def test_forgotten_groups_are_listed(term: TermActors) -> None:
    """In the order of the queue, by tag or all, with the trajectories that count."""
    await train(term)
    assert await listed(term) == [f"t{number}" for number in range(GROUPS)]
    assert await listed(term, "odd") == [f"t{number}" for number in range(1, GROUPS, 2)]
    assert await listed(term, "other") == []
    parts = [part async for part in list_groups(term.queue, term.shards, "")]
    first = parts[0][0]
    assert first.trajectory_ids == ("t0:0:0",)
    assert first.record.state == common_pb2.GROUP_STATE_TRAINED
    assert (first.record.step, first.record.task.payload_json) == (1, "")


async def test_list_without_forgotten_groups_reads_no_shard(
    term: TermActors, shards: FakeShards
) -> None:
    """Whoever waits for an evaluation asks again and again."""
    await train(term)
    await submit(term, make_task("e", evaluation=True, tag="new"))
    shards.down |= {"s0", "s1"}
    assert await listed(term, "new") == ["e"]
    with pytest.raises(Unavailable):
        await listed(term, "odd")
