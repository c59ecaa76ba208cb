"""Results that a runner reports together: each is settled by itself."""

from __future__ import annotations

import asyncio

import pytest

from forge.core.errors import InvalidArgument, Unavailable
from forge.v1 import scheduler_pb2
from services.scheduler.groups.rollout_results import settle_results
from services.scheduler.state.messages.term import SetAway
from tests.support.runtime.waiting import until
from tests.support.scheduler.cluster import make_task
from tests.support.scheduler.term import ASK_S, FakeShards, TermActors
from tests.support.scheduler.term_calls import lease, name_on, status, submit

Outcome = scheduler_pb2.FinishRolloutsRequest.Outcome
REASONS = {
    "nobody:0:0": "task_id 'nobody' is not in the queue",
    "a:7:0": "trajectory_id 'a:7:0': task a has rollouts 0 to 0",
}


async def finish(term: TermActors, *ids: str) -> dict[str, str]:
    """The reasons of the refused results, by trajectory id."""
    results = [Outcome(trajectory_id=each) for each in ids]
    refused = await settle_results(term.queue, term.shards, results)
    return {refusal.trajectory_id: refusal.error for refusal in refused}


async def sealed_on(term: TermActors, *shards: str) -> list[str]:
    """A leased and sealed rollout on each shard."""
    await submit(term, *(make_task(name_on(shard)) for shard in shards))
    ids = await lease(term, len(shards))
    for each in ids:
        term.shards.seal(each)
    return ids


async def complete(term: TermActors) -> int:
    found = await status(term)
    return int(found.complete_in_window + found.complete_outside_window)


async def test_an_unknown_trajectory_is_answered_by_itself(term: TermActors) -> None:
    """The other results of the call are settled: a sealed one, and a failure."""
    await submit(term, make_task("a"), make_task("b"))
    sealed, failed = await lease(term, 2)
    term.shards.seal(sealed)
    assert await finish(term, "nobody:0:0", sealed, "a:7:0", failed) == REASONS
    assert await complete(term) == 1
    assert (await status(term)).retries == 1
    assert await finish(term, *REASONS, sealed, failed) == REASONS, "repeated: nothing changes"
    assert (await status(term)).retries == 1


async def test_results_of_other_shards_do_not_wait_for_one_that_is_down(
    term: TermActors, shards: FakeShards
) -> None:
    """The call is refused, and repeated until the shard answers; their groups are complete."""
    ids = await sealed_on(term, "s0", "s1")
    shards.down = {"s1"}
    with pytest.raises(Unavailable):
        await finish(term, *ids)
    assert await complete(term) == 1
    shards.down = set()
    assert await finish(term, *ids) == {}
    assert await complete(term) == 2


async def test_results_of_other_shards_do_not_wait_for_one_that_hangs(
    term: TermActors, shards: FakeShards
) -> None:
    """The deadline of the runner's call may be over before the shard has an error."""
    ids = await sealed_on(term, "s0", "s1")
    shards.hung = {"s1"}
    call = asyncio.create_task(finish(term, *ids))

    async def one_is_complete() -> bool:
        return await complete(term) == 1

    await until(one_is_complete)
    assert not call.done()
    call.cancel()


async def test_known_results_are_settled_while_a_shard_is_unread(term: TermActors) -> None:
    """An unknown one may be on it, and is not refused."""
    (sealed,) = await sealed_on(term, "s0")
    away = frozenset({"s1"})
    await term.queue.ask(SetAway(shards=away, unread=away), timeout_s=ASK_S)
    with pytest.raises(Unavailable, match="pool shard s1, which is awaited"):
        await finish(term, sealed, "nobody:0:0")
    assert await complete(term) == 1


async def test_a_malformed_result_refuses_the_call(term: TermActors) -> None:
    """It is a mistake of the program; nothing is settled."""
    (sealed,) = await sealed_on(term, "s0")
    with pytest.raises(InvalidArgument, match=r"outcomes\[1\]: trajectory_id 'none'"):
        await finish(term, sealed, "none")
    assert await complete(term) == 0
