"""Groups that were settled long ago leave memory; the answers stay the same."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from forge.core.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    Unavailable,
)
from forge.core.queue.groups import Phase
from forge.v1 import common_pb2, scheduler_pb2
from services.scheduler.groups.group_listing import list_groups
from services.scheduler.groups.rollout_results import settle_results
from services.scheduler.state.left_out_groups import LeftOut
from services.scheduler.state.messages.batches import (
    CommitBatch,
    FindForgotten,
    ReleaseBatch,
    Rewind,
    TakeBatch,
)
from services.scheduler.state.messages.groups import ReserveIndices, RestoreGroups
from services.scheduler.state.messages.rollouts import (
    LeaseRollouts,
    RenewRollouts,
)
from services.scheduler.state.messages.term import GetStatus
from tests.support.scheduler.cluster import make_task
from tests.support.scheduler.term import ASK_S, Clock, FakeShards, TermActors
from tests.support.scheduler.term_calls import submit

GROUPS = 12


@pytest_asyncio.fixture
async def term(shards: FakeShards, clock: Clock) -> AsyncIterator[TermActors]:
    """It holds two settled groups at most, and the groups of the last step."""
    shards.tells_all = True
    actors = TermActors(shards, clock, most_settled=2)
    await actors.start()
    yield actors
    await actors.system.stop()


async def seal_next(term: TermActors) -> list[str]:
    future = await term.queue.ask(LeaseRollouts(runner_id="r", max_rollouts=100), timeout_s=ASK_S)
    ids = [grant.trajectory_id for grant in await future]
    for trajectory_id in ids:
        term.shards.seal(trajectory_id)
    await report(term, *ids)
    return ids


async def report(term: TermActors, *ids: str) -> None:
    results = [scheduler_pb2.FinishRolloutsRequest.Outcome(trajectory_id=each) for each in ids]
    refused = await settle_results(term.queue, term.shards, results)
    if refused:
        raise NotFound(refused[0].error)


async def train(term: TermActors, *, groups: int = GROUPS) -> list[CommitBatch]:
    """Groups t0, t1 and on, each by a step of its own; the commits."""
    commits = []
    for step in range(1, groups + 1):
        await submit(term, make_task(f"t{step - 1}", tag="odd" if step % 2 == 0 else ""))
        await seal_next(term)
        take = TakeBatch(trainer_id="t", max_groups=1)
        batch = await (await term.queue.ask(take, timeout_s=ASK_S))
        ids = [view.record.task.task_id for view in batch.groups]
        commits.append(CommitBatch(batch_id=batch.batch_id, step=step, task_ids=ids))
        await term.commits.ask(commits[-1], timeout_s=ASK_S)
    return commits


async def listed(term: TermActors, tag: str = "", *, newest: int = 0) -> list[str]:
    return [
        view.record.task.task_id
        async for part in list_groups(term.queue, term.shards, tag, newest=newest)
        for view in part
    ]


async def counts(term: TermActors) -> tuple[int, ...]:
    status = await term.queue.ask(GetStatus(), timeout_s=ASK_S)
    return status.accepted, status.trained, status.tombstoned, status.pending


async def test_memory_does_not_grow_with_trained_groups(term: TermActors) -> None:
    """Two groups stay in memory; the counts have every one."""
    await train(term)
    assert len(term.state.catalog.tagged("")) == len(term.state.queue.ledger) == 2
    assert await counts(term) == (GROUPS, GROUPS, 0, 0)


async def test_memory_does_not_grow_with_tombstoned_groups(term: TermActors) -> None:
    """Nor with evaluated ones."""
    for number in range(GROUPS):
        await submit(term, make_task(f"t{number}"), make_task(f"e{number}", evaluation=True))
        await seal_next(term)
        take = TakeBatch(trainer_id="t", max_groups=1)
        batch = await (await term.queue.ask(take, timeout_s=ASK_S))
        release = ReleaseBatch(batch_id=batch.batch_id, reason="gone")
        await term.commits.ask(release, timeout_s=ASK_S)
    assert len(term.state.catalog.tagged("")) == len(term.state.queue.ledger) == 2
    assert await counts(term) == (GROUPS, 0, GROUPS, 0)


async def test_duplicate_of_a_forgotten_group_is_recognized(
    term: TermActors, shards: FakeShards
) -> None:
    """By id, and strict about content. The shards are asked once for each submission, and not for
    held groups."""
    await train(term)
    shards.looked_up.clear()
    known = (make_task("t0"), make_task("t1", tag="odd"), make_task("t11", tag="odd"))
    assert await submit(term, *known) == 0
    assert shards.looked_up == [(("t0", "t1"), ())]
    with pytest.raises(InvalidArgument, match="'t0' was submitted before with different content"):
        await submit(term, make_task("t0", domain="qa"))


async def test_new_task_waits_for_a_shard_that_may_have_it(
    term: TermActors, shards: FakeShards
) -> None:
    """A shard with forgotten groups is unreachable: held or found groups are known, all others may
    be there, and a full queue accepts duplicates."""
    await train(term)
    where = {one.task.task_id: shard for shard, all_ in shards.groups.items() for one in all_}
    shards.down.add(next(shard for shard in ("s0", "s1") if shard != where["t0"]))
    assert await submit(term, make_task("t0"), make_task("t11", tag="odd")) == 0
    with pytest.raises(Unavailable, match="does not answer"):
        await submit(term, make_task("new"))
    with pytest.raises(Unavailable, match="does not answer"):
        await report(term, "new:0:0")
    assert await counts(term) == (GROUPS, GROUPS, 0, 0)
    shards.down.clear()
    assert await submit(term, make_task("new")) == 1


async def test_term_without_forgotten_groups_asks_no_shard(
    term: TermActors, shards: FakeShards
) -> None:
    """Tasks are new, and other reports are of unknown tasks."""
    assert await submit(term, make_task("t0")) == 1
    with pytest.raises(NotFound):
        await report(term, "other:0:0")
    assert shards.looked_up == []


async def test_task_whose_write_was_uncertain_is_no_duplicate(
    term: TermActors, shards: FakeShards
) -> None:
    """It may be stored, and counts once it is acknowledged; no shard is asked."""
    await train(term)
    shards.refusal = DeadlineExceeded
    shards.down |= {"s0", "s1"}
    shards.answers_look_ups = True
    with pytest.raises(DeadlineExceeded):
        await submit(term, make_task("new"))
    for shard in ("s0", "s1"):
        shards.groups[shard] += [common_pb2.GroupRecord(task=make_task("new"), pool_shard=shard)]
    shards.down.clear()
    assert await submit(term, make_task("new")) == 1
    assert await counts(term) == (GROUPS + 1, GROUPS, 0, 1)


async def test_late_calls_for_a_forgotten_group_are_answered(term: TermActors) -> None:
    """A report changes nothing, and a claim is lost, as for a held settled group; a task that never
    existed is unknown."""
    await train(term)
    await report(term, "t0:0:0", "t0:0:7")
    renew = RenewRollouts(lease_ids=["t0:0:0", "t11:0:0"])
    assert await term.queue.ask(renew, timeout_s=ASK_S) == ("t0:0:0", "t11:0:0")
    assert await counts(term) == (GROUPS, GROUPS, 0, 0)
    with pytest.raises(NotFound):
        await report(term, "other:0:0")


async def test_repeated_commit_of_forgotten_groups_is_acknowledged(term: TermActors) -> None:
    """Under its own step; another step is refused."""
    first, *_ = await train(term)
    await term.commits.ask(first, timeout_s=ASK_S)
    other = CommitBatch(batch_id=first.batch_id, step=5, task_ids=first.task_ids)
    with pytest.raises(FailedPrecondition, match="committed by step 1"):
        await term.commits.ask(other, timeout_s=ASK_S)
    unnamed = CommitBatch(batch_id=first.batch_id, step=1, task_ids=())
    await term.commits.ask(unnamed, timeout_s=ASK_S)
    unknown = CommitBatch(batch_id="batch-0-99", step=1, task_ids=["other"])
    with pytest.raises(NotFound):
        await term.commits.ask(unknown, timeout_s=ASK_S)
    assert await counts(term) == (GROUPS, GROUPS, 0, 0)


async def test_rewind_restores_forgotten_groups(term: TermActors) -> None:
    """They are read from the pool, and trained again."""
    await train(term)
    assert await term.commits.ask(Rewind(step=3), timeout_s=ASK_S) == GROUPS - 3
    assert await counts(term) == (GROUPS, 3, 0, GROUPS - 3)
    taken = await (
        await term.queue.ask(TakeBatch(trainer_id="t", max_groups=GROUPS), timeout_s=ASK_S)
    )
    assert [view.record.task.task_id for view in taken.groups] == [f"t{n}" for n in range(3, 12)]
    commit = CommitBatch(batch_id=taken.batch_id, step=4, task_ids=())
    await term.commits.ask(commit, timeout_s=ASK_S)
    assert await counts(term) == (GROUPS, GROUPS, 0, 0)


async def test_rewind_without_the_pool_changes_nothing(
    term: TermActors, shards: FakeShards
) -> None:
    """It is UNAVAILABLE, and complete once the pool answers."""
    await train(term)
    shards.down |= {"s0", "s1"}
    with pytest.raises(Unavailable):
        await term.commits.ask(Rewind(step=3), timeout_s=ASK_S)
    assert await counts(term) == (GROUPS, GROUPS, 0, 0)
    shards.down.clear()
    assert await term.commits.ask(Rewind(step=3), timeout_s=ASK_S) == GROUPS - 3


async def test_forgotten_groups_are_listed(term: TermActors) -> None:
    """In queue order, by tag or all, with their counting trajectories."""
    await train(term)
    assert await listed(term) == [f"t{number}" for number in range(GROUPS)]
    assert await listed(term, "odd") == [f"t{number}" for number in range(1, GROUPS, 2)]
    assert await listed(term, "other") == []
    parts = [part async for part in list_groups(term.queue, term.shards, "")]
    first = parts[0][0]
    assert first.trajectory_ids == ("t0:0:0",)
    assert first.record.state == common_pb2.GROUP_STATE_TRAINED
    assert (first.record.step, first.record.task.payload_json) == (1, "")


async def test_newest_groups_are_those_submitted_last(term: TermActors, shards: FakeShards) -> None:
    """In the same order, from the pool too; it is not read if memory has as many."""
    await train(term)
    names = [f"t{number}" for number in range(GROUPS)]
    for newest in range(1, GROUPS + 2):
        assert await listed(term, newest=newest) == names[-newest:]
    assert await listed(term, "odd", newest=2) == names[1::2][-2:]
    shards.down |= {"s0", "s1"}
    assert await listed(term, newest=2) == names[-2:]
    with pytest.raises(Unavailable):
        await listed(term, newest=3)


async def test_list_waits_for_a_shard_with_forgotten_groups(
    term: TermActors, shards: FakeShards
) -> None:
    """It may have groups of the tag. Without forgotten groups no shard is asked."""
    await submit(term, make_task("e", evaluation=True, tag="new"))
    shards.down |= {"s0", "s1"}
    assert await listed(term, "new") == ["e"]
    shards.down.clear()
    await train(term)
    shards.down |= {"s0", "s1"}
    with pytest.raises(Unavailable):
        await listed(term, "new")


def left_out(count: int) -> LeftOut:
    """So many trained groups of s0 that a scan left out, and as many that were skipped."""
    return LeftOut(
        shard="s0",
        counts={(False, Phase.TRAINED): count, (False, Phase.TOMBSTONED): count},
        skipped=count,
        completed={"code": 8 * count},
        recent={"code": (200.0, 1.0, 100.0, 0.5)},
        next_index=4 * count,
        next_eval_index=3,
        last_step=count,
    )


async def test_groups_left_out_of_a_scan_are_counted(term: TermActors) -> None:
    """In the ledger, in progress and in the queue indices, and once, also if the message is
    repeated."""
    for _ in range(2):
        part = RestoreGroups(number=0, left_out=[left_out(100)])
        await term.queue.ask(part, timeout_s=ASK_S)
    assert await counts(term) == (200, 100, 100, 0)
    status = await term.queue.ask(GetStatus(), timeout_s=ASK_S)
    assert status.skipped == 100
    (domain,) = status.domains
    assert (domain.completed_rollouts, domain.recent_reward) == (800, 0.75)
    assert status.head == 400
    assert await term.queue.ask(FindForgotten(step=50), timeout_s=ASK_S) == {"s0"}
    assert await term.queue.ask(FindForgotten(step=100), timeout_s=ASK_S) == frozenset()


async def test_groups_of_a_shard_without_look_up_are_all_held(term: TermActors) -> None:
    """A shard of an earlier version has joined: from then on no group is forgotten."""
    await term.queue.ask(RestoreGroups(number=0, holds_all=True), timeout_s=ASK_S)
    await train(term)
    assert len(term.state.queue.ledger) == GROUPS
    assert await submit(term, make_task("t0")) == 0
    assert term.shards.looked_up == []


async def test_queue_indices_of_a_joined_shard_are_not_used_again(
    term: TermActors, shards: FakeShards
) -> None:
    """It was unreachable at the start of the term: two groups with one index would be one to the
    window."""
    reserve = ReserveIndices(next_index={common_pb2.PURPOSE_TRAIN: 7})
    await term.submissions.ask(reserve, timeout_s=ASK_S)
    await submit(term, make_task("new"))
    assert [one.queue_index for all_ in shards.groups.values() for one in all_] == [7]
