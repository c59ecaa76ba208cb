"""Submissions in one leader's term: a group is queued once it is stored."""

from __future__ import annotations

import pytest

from forge.core.errors import InvalidArgument, ResourceExhausted, Unavailable
from tests.support.scheduler.cluster import make_task
from tests.support.scheduler.term import FakeShards, TermActors
from tests.support.scheduler.term_calls import lease, name_on, status, submit


async def test_group_is_queued_only_once_it_is_stored(term: TermActors, shards: FakeShards) -> None:
    """A shard without an answer fails its own groups alone; a retry keeps their indices."""
    here, there = name_on("s0"), name_on("s1")
    shards.down.add("s1")
    with pytest.raises(Unavailable, match="s1"):
        await submit(term, make_task(there), make_task(here))
    assert await lease(term) == [f"{here}:0:0"]
    shards.down.clear()
    assert await submit(term, make_task(there), make_task(here)) == 1
    (late,) = shards.groups["s1"]
    assert late.queue_index == 0
    assert (await status(term)).accepted == 2


async def test_unacknowledged_group_cannot_change_its_content(
    term: TermActors, shards: FakeShards
) -> None:
    """A group that may be stored is submitted with the same content, or refused."""
    shards.down |= {"s0", "s1"}
    with pytest.raises(Unavailable):
        await submit(term, make_task("a"))
    with pytest.raises(InvalidArgument, match="'a' was submitted before with different content"):
        await submit(term, make_task("a", size=2))


async def test_unacknowledged_groups_are_bounded(
    term: TermActors, shards: FakeShards, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that submits new tasks to an unreachable pool is refused; repeated tasks are
    accepted."""
    monkeypatch.setattr("services.scheduler.actors.submissions.MAX_UNSETTLED", 1)
    shards.down |= {"s0", "s1"}
    for _ in range(2):
        with pytest.raises(Unavailable):
            await submit(term, make_task("a"))
    with pytest.raises(ResourceExhausted, match="did not confirm the writes of 1 groups"):
        await submit(term, make_task("b"))
    shards.down.clear()
    assert await submit(term, make_task("a")) == 1
    assert await submit(term, make_task("b")) == 1


async def test_known_group_is_not_accepted_twice(term: TermActors) -> None:
    """SubmitTasks is idempotent by id, and strict about content."""
    assert await submit(term, make_task("a")) == 1
    assert await submit(term, make_task("a")) == 0
    with pytest.raises(InvalidArgument, match="different content"):
        await submit(term, make_task("a", domain="qa"))


async def test_full_queue_refuses_with_a_hint(term: TermActors) -> None:
    """Overload is answered, not stored."""
    await submit(term, *(make_task(f"a{i}") for i in range(100)))
    with pytest.raises(ResourceExhausted, match="100 groups are pending") as refused:
        await submit(term, make_task("b"))
    assert refused.value.retry_after_s
