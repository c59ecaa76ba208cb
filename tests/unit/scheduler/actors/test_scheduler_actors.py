"""The actors of one leader's term, around a pool that comes and goes."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from forge.core.errors import ResourceExhausted, Unavailable
from forge.v1 import common_pb2
from services.scheduler.state.messages.batches import (
    BatchView,
    CommitBatch,
    ReleaseBatch,
    Rewind,
    TakeBatch,
)
from services.scheduler.state.messages.groups import ViewGroups
from services.scheduler.state.messages.rollouts import (
    AttemptReport,
    DismissRunner,
    LeaseRollouts,
    RenewRollouts,
    SettleRollouts,
)
from services.scheduler.state.messages.term import SetAway, Tick
from tests.support.runtime.waiting import settle, until
from tests.support.scheduler.cluster import make_task
from tests.support.scheduler.term import ASK_S, Clock, FakeShards, TermActors
from tests.support.scheduler.term_calls import lease, name_on, status, submit


async def complete(term: TermActors, *trajectory_ids: str) -> None:
    for trajectory_id in trajectory_ids:
        term.shards.seal(trajectory_id)
    reports = [
        AttemptReport(trajectory_id=i, summary=term.shards.stored[i]) for i in trajectory_ids
    ]
    await term.queue.ask(SettleRollouts(reports=reports), timeout_s=ASK_S)


async def take(term: TermActors, size: int) -> BatchView:
    future = await term.queue.ask(TakeBatch(trainer_id="t", max_groups=size), timeout_s=ASK_S)
    view: BatchView = await future
    return view


async def test_waiting_runner_gets_a_submitted_rollout(term: TermActors) -> None:
    """The change answers the call, without polling."""
    ask = LeaseRollouts(runner_id="r", max_rollouts=1)
    future = await term.queue.ask(ask, timeout_s=ASK_S)
    assert not future.done()
    await submit(term, make_task("a"))
    (grant,) = await asyncio.wait_for(future, ASK_S)
    assert grant.trajectory_id == "a:0:0"


async def test_waiting_runner_gets_a_rollout_admitted_by_a_batch(term: TermActors) -> None:
    """A complete group is assigned to the batch that a trainer waits for, and frees a place at
    once: N is 8, and the ninth group starts."""
    await submit(term, *(make_task(f"a{index}") for index in range(9)))
    first, *_ = await lease(term)
    runner = await term.queue.ask(LeaseRollouts(runner_id="r", max_rollouts=1), timeout_s=ASK_S)
    trainer = await term.queue.ask(TakeBatch(trainer_id="t", max_groups=4), timeout_s=ASK_S)
    await complete(term, first)
    assert runner.done()
    assert not trainer.done()


async def test_cancelled_wait_of_a_runner_gets_no_rollout(term: TermActors) -> None:
    """A cancelled wait is passed over."""
    ask = LeaseRollouts(runner_id="gone", max_rollouts=1)
    (await term.queue.ask(ask, timeout_s=ASK_S)).cancel()
    await submit(term, make_task("a"))
    assert await lease(term) == ["a:0:0"]


async def test_leaving_runner_gets_an_empty_answer(term: TermActors) -> None:
    """Other runners still wait, and get the next rollouts."""
    ask = partial(LeaseRollouts, runner_id="leaving", max_rollouts=1)
    first, second = [await term.queue.ask(ask(), timeout_s=ASK_S) for _ in range(2)]
    other = await term.queue.ask(LeaseRollouts(runner_id="r", max_rollouts=1), timeout_s=ASK_S)
    await term.queue.ask(DismissRunner(runner_id="leaving"), timeout_s=ASK_S)
    assert (first.result(), second.result(), other.done()) == ((), (), False)
    await submit(term, make_task("a"))
    (grant,) = await asyncio.wait_for(other, ASK_S)
    assert grant.trajectory_id == "a:0:0"


async def test_end_of_the_term_answers_every_waiting_call(term: TermActors) -> None:
    """The callers then ask the next leader."""
    future = await term.queue.ask(TakeBatch(trainer_id="t", max_groups=1), timeout_s=ASK_S)
    await term.system.stop()
    with pytest.raises(Unavailable, match="is no longer the leader"):
        await future


async def test_commit_is_stored_before_it_counts(term: TermActors, shards: FakeShards) -> None:
    """If the pool does not answer, the batch stays with its trainer, which retries."""
    await submit(term, make_task("a"))
    await complete(term, *await lease(term))
    batch = await take(term, 1)
    commit = CommitBatch(batch_id=batch.batch_id, step=1, task_ids=["a"])
    shards.down |= {"s0", "s1"}
    with pytest.raises(Unavailable):
        await term.commits.ask(commit, timeout_s=ASK_S)
    assert (await status(term)).trained == 0
    shards.down.clear()
    await term.commits.ask(commit, timeout_s=ASK_S)
    await term.commits.ask(commit, timeout_s=ASK_S)
    assert (await status(term)).trained == 1
    assert shards.states() == {"a": common_pb2.GROUP_STATE_TRAINED}


async def test_release_with_a_reason_is_stored_as_a_tombstone(
    term: TermActors, shards: FakeShards
) -> None:
    """The groups stay tombstoned."""
    await submit(term, make_task("a"))
    await complete(term, *await lease(term))
    batch = await take(term, 1)
    release = ReleaseBatch(batch_id=batch.batch_id, reason="checksum failed")
    await term.commits.ask(release, timeout_s=ASK_S)
    assert shards.states() == {"a": common_pb2.GROUP_STATE_TOMBSTONED}
    assert (await status(term)).tombstoned == 1


async def test_rewind_is_recorded_before_it_is_stored_in_the_pool(
    term: TermActors, shards: FakeShards
) -> None:
    """If the leader dies in between, its successor knows the void batches."""
    await submit(term, make_task("a"))
    await complete(term, *await lease(term))
    batch = await take(term, 1)
    await term.commits.ask(
        CommitBatch(batch_id=batch.batch_id, step=1, task_ids=["a"]), timeout_s=ASK_S
    )
    shards.down |= {"s0", "s1"}
    with pytest.raises(Unavailable):
        await term.commits.ask(Rewind(step=0), timeout_s=ASK_S)
    assert term.record.fields == {"void_before": (0, 1), "head": 0}
    shards.down.clear()
    assert await term.commits.ask(Rewind(step=0), timeout_s=ASK_S) == 1


async def test_groups_freed_before_a_run_starts_over_are_tombstoned(
    term: TermActors, shards: FakeShards
) -> None:
    """They have nothing to train on. The others are complete again; the rewind does not fail."""
    await submit(term, make_task("a"), make_task("b"))
    await complete(term, *await lease(term))
    batch = await take(term, 2)
    commit = CommitBatch(batch_id=batch.batch_id, step=1, task_ids=["a", "b"])
    await term.commits.ask(commit, timeout_s=ASK_S)
    shards.freed = {"a"}
    assert await term.commits.ask(Rewind(step=0), timeout_s=ASK_S) == 2
    views = await term.queue.ask(ViewGroups(task_ids=["a", "b"]), timeout_s=ASK_S)
    assert [view.phase for view in views] == ["tombstoned", "complete"]
    assert "freed" in views[0].record.reason


async def test_final_state_of_an_unreachable_shard_delays_no_other(
    term: TermActors, shards: FakeShards, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tombstone is stored when its shard is back; others at once."""
    monkeypatch.setattr("services.scheduler.actors.outcome_writer.RETRY_S", 0.01)
    here, there = name_on("s0"), name_on("s1")
    await submit(term, make_task(here), make_task(there))
    shards.down.add("s1")
    reports = [
        AttemptReport(trajectory_id=each, error="no such scaffold", permanent=True)
        for each in await lease(term)
    ]
    await term.queue.ask(SettleRollouts(reports=reports), timeout_s=ASK_S)
    await until(lambda: here in shards.states())
    assert there not in shards.states()
    shards.down.clear()
    await until(lambda: there in shards.states())
    assert (await status(term)).tombstoned == 2


async def running(term: TermActors, *, most: int) -> bool:
    """Whether no more rollouts than that run."""
    found: bool = (await status(term)).running_rollouts <= most
    return found


async def test_final_states_are_stored_before_an_orderly_end(
    term: TermActors, shards: FakeShards, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next leader does not run a group that was tombstoned already."""

    async def answer_late(shard: str) -> None:
        await settle()

    await submit(term, make_task("a"))
    (trajectory_id,) = await lease(term)
    monkeypatch.setattr(shards, "_answer", answer_late)
    report = AttemptReport(trajectory_id=trajectory_id, error="no such scaffold", permanent=True)
    await term.queue.ask(SettleRollouts(reports=[report]), timeout_s=ASK_S)
    await status(term)
    await term.system.stop()
    assert shards.states() == {"a": common_pb2.GROUP_STATE_TOMBSTONED}


async def test_shard_that_hangs_with_a_final_state_delays_no_commit(
    term: TermActors, shards: FakeShards
) -> None:
    """Trainers and the final states of other shards do not wait for its failure."""
    here, there = name_on("s0"), name_on("s1")
    await submit(term, make_task(here), make_task(there), make_task(name_on("s0", "more")))
    shards.hung.add("s1")
    sealed, *given_up = sorted(await lease(term), key=lambda each: not each.startswith("more"))
    await complete(term, sealed)
    batch = await take(term, 1)
    reports = [
        AttemptReport(trajectory_id=each, error="no such scaffold", permanent=True)
        for each in given_up
    ]
    for report in reversed(reports):
        await term.queue.ask(SettleRollouts(reports=[report]), timeout_s=ASK_S)
    commit = CommitBatch(batch_id=batch.batch_id, step=1, task_ids=())
    await asyncio.wait_for(term.commits.ask(commit, timeout_s=ASK_S), ASK_S)
    await until(lambda: here in shards.states())
    assert there not in shards.states()


async def test_expired_claim_is_settled_by_the_pools_trajectory(
    term: TermActors, shards: FakeShards, clock: Clock
) -> None:
    """Sealed counts as complete; otherwise the rollout is attempted again, and the silent runner
    has lost it."""
    await submit(term, make_task("a", size=2))
    sealed, lost = await lease(term)
    shards.seal(sealed)
    clock.now_s = 11.0
    await term.queue.ask(Tick(), timeout_s=ASK_S)
    await until(lambda: running(term, most=0))
    found = await status(term)
    assert (found.retries, found.domains[0].completed_rollouts) == (1, 1)
    clock.now_s = 13.0
    assert await lease(term) == ["a:1:1"]
    assert await term.queue.ask(RenewRollouts(lease_ids=[lost]), timeout_s=ASK_S) == (lost,)


async def test_shard_that_hangs_delays_no_claim_of_another(
    term: TermActors, shards: FakeShards, clock: Clock
) -> None:
    """Each shard is asked on its own, and a shard without an answer is not asked again."""
    for shard in ("s1", "s0"):
        await submit(term, make_task(name_on(shard)))
        shards.hung.add("s1")
        (held,) = await lease(term)
        shards.seal(held)
        clock.now_s += 11.0
        await term.queue.ask(Tick(), timeout_s=ASK_S)
    await until(lambda: running(term, most=1))


async def test_overloaded_pool_ends_no_term(
    term: TermActors, shards: FakeShards, clock: Clock
) -> None:
    """For every answer to a look-up the claims stay, and it is repeated."""
    await submit(term, make_task("a"))
    (held,) = await lease(term)
    shards.down |= {"s0", "s1"}
    shards.refusal = ResourceExhausted
    clock.now_s = 11.0
    await term.queue.ask(Tick(), timeout_s=ASK_S)
    await settle()
    shards.down.clear()
    shards.seal(held)
    clock.now_s = 14.0
    await term.queue.ask(Tick(), timeout_s=ASK_S)
    await until(lambda: running(term, most=0))
    assert (await status(term)).retries == 0
    assert term.expired_leases.alive


async def test_claims_on_an_unreachable_shard_are_kept(
    term: TermActors, shards: FakeShards, clock: Clock
) -> None:
    """An outage of the pool costs no attempt."""
    name = name_on("s1")
    await submit(term, make_task(name))
    (held,) = await lease(term)
    await term.queue.ask(SetAway(shards=frozenset({"s1"})), timeout_s=ASK_S)
    clock.now_s = 500.0
    await term.queue.ask(Tick(), timeout_s=ASK_S)
    assert (await status(term)).running_rollouts == 1
    await term.queue.ask(SetAway(shards=frozenset()), timeout_s=ASK_S)
    assert await term.queue.ask(RenewRollouts(lease_ids=[held]), timeout_s=ASK_S) == ()


async def test_lease_response_fits_into_a_message(term: TermActors) -> None:
    """Tasks with large payloads are leased fewer at a time."""
    tasks = []
    for number in range(8):
        task = make_task(f"big-{number}")
        task.payload_json = '{"text": "' + "x" * 900_000 + '"}'
        tasks.append(task)
    await submit(term, *tasks)
    first = await lease(term, 8)
    assert 1 <= len(first) < 8
    assert len(await lease(term, 8)) >= 1


async def test_payload_of_a_settled_group_is_dropped(term: TermActors) -> None:
    """Memory follows the open groups; listings have no payloads."""
    await submit(term, make_task("a"))
    assert term.state.catalog.task("a").payload_json
    await complete(term, *await lease(term))
    assert term.state.catalog.task("a").payload_json == ""
    assert await submit(term, make_task("a")) == 0
