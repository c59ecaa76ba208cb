"""The order of moves while a shard retires, with stand-ins for the queue and the pool."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any

import pytest
import pytest_asyncio

from forge.core.errors import (
    ActorStopped,
    DeadlineExceeded,
    ForgeError,
    MailboxFull,
    Unavailable,
)
from forge.core.placement.sharding import choose_shard
from forge.runtime.actors.actor_system import ActorRef, ActorSystem
from forge.v1 import pool_pb2, scheduler_pb2
from services.scheduler.actors.shard_removals import ShardRemovals
from services.scheduler.shards.shard_membership import ShardMembership
from services.scheduler.state.messages.removals import (
    DeclareShardLost,
    FindMovable,
    GroupsMoved,
    GroupsOn,
    Movable,
    OnShard,
    RemoveShard,
    RetireShard,
)
from services.scheduler.term_record import Move, TermRecord
from tests.support.runtime.waiting import until

ASK_S = 30.0
SHARDS = frozenset({"s0", "s1", "s2"})
TASK = next(f"task-{n}" for n in range(99) if choose_shard(f"task-{n}", {"s0", "s2"}) == "s2")
"""It would move to s2."""


class Queue:
    """One pending group on s1."""

    def __init__(self) -> None:
        self.shard = {TASK: "s1"}
        self.busy = 0
        self.removed: list[str] = []
        self.errors: dict[type, list[ForgeError]] = {}
        """By message type: raised by the next asks, one each."""
        self.stops_at: type | None = None
        self.stopped = False

    async def ask(self, message: Any, *, timeout_s: float) -> Any:
        self.stopped |= type(message) is self.stops_at
        if self.stopped:
            raise ActorStopped("actor queue has stopped")
        if errors := self.errors.get(type(message)):
            raise errors.pop(0)
        match message:
            case RemoveShard(shard=shard):
                self.removed.append(shard)
            case FindMovable(shard=shard):
                there = [task for task, at in self.shard.items() if at == shard]
                return Movable(task_ids=[] if self.busy else there, busy=self.busy)
            case GroupsMoved(moved=moved, target=target):
                self.shard |= dict.fromkeys(moved, target)
            case GroupsOn():
                return OnShard(records=[], forgotten={})
        return None


class Pool:
    """Three shards, one of which may be unreachable."""

    def __init__(self) -> None:
        self.unreachable: frozenset[str] = frozenset()
        self.copies: set[str] = set()
        """Shards with a copy of the group that is not marked."""
        self.at = "s1"
        self.refusals = 0
        self.fail_mark = False

    def live(self) -> frozenset[str]:
        return SHARDS - self.unreachable

    def forget_store(self, lineage: str) -> None:
        pass

    def relocate(self, task_ids: Sequence[str], target: str) -> None:
        pass

    async def list_to_move(self, shard: str, *, limit: int) -> pool_pb2.ListGroupsToMoveResponse:
        return pool_pb2.ListGroupsToMoveResponse(groups_left=int(self.at == shard))

    async def import_groups(
        self, target: str, source: str, task_ids: Sequence[str]
    ) -> list[pool_pb2.GroupDigest]:
        self._check(target)
        if self.at != source:
            return []
        self.copies.add(target)
        return [pool_pb2.GroupDigest(task_id=TASK, digest=b"d")]

    async def mark_moved(
        self, source: str, target: str, groups: Sequence[pool_pb2.GroupDigest]
    ) -> set[str]:
        if self.fail_mark:
            self.fail_mark, self.unreachable = False, frozenset({target})
            raise Unavailable("gone")
        if self.at == source:
            self.at = target
        self.copies.discard(target)
        return {TASK} if self.at == target else set()

    async def look_up(self, *_: Any, **__: Any) -> tuple[dict[str, Any], dict[str, int]]:
        return {}, {}

    def _check(self, shard: str) -> None:
        if shard in self.unreachable:
            self.refusals += 1
            raise Unavailable(f"pool shard {shard} does not answer")


class Record:
    """The term record, in memory."""

    def __init__(self) -> None:
        self.record = TermRecord(shards=SHARDS)
        self.moves: list[Move] = []

    async def amend(self, **changes: Any) -> None:
        if "move" in changes:
            self.moves.append(changes["move"])

    async def read(self) -> TermRecord:
        return TermRecord(move=self.moves[-1] if self.moves else None)

    async def remove_shards(self, gone: set[str]) -> None:
        pass


class Coordinator:
    """An etcd without records of shards."""

    async def get(self, key: str) -> None:
        return None

    async def compare_and_swap(self, key: str, value: bytes, *, expected_revision: int) -> int:
        return 1


class Term:
    """The actor with its stand-ins."""

    removals: ActorRef

    def __init__(self) -> None:
        self.queue, self.pool, self.record = Queue(), Pool(), Record()
        self.members = ShardMembership()
        self.members.registered = SHARDS
        self.system = ActorSystem("term")

    async def start(self) -> None:
        stand_ins: list[Any] = [self.queue, self.queue, self.pool]
        stand_ins += [self.members, Coordinator(), self.record]
        make = partial(ShardRemovals, *stand_ins)
        self.removals = await self.system.spawn(make, name="removals")

    async def retire(self, **more: Any) -> scheduler_pb2.RetireShardResponse:
        ask = RetireShard(shard="s1", **more)
        answer: scheduler_pb2.RetireShardResponse = await self.removals.ask(ask, timeout_s=ASK_S)
        return answer


@pytest_asyncio.fixture
async def term() -> AsyncIterator[Term]:
    made = Term()
    await made.start()
    yield made
    await made.system.stop()


async def test_a_move_to_an_unreachable_target_is_completed_before_any_other(term: Term) -> None:
    """That target may have copies: the same groups on a second target would be there twice."""
    term.pool.fail_mark = True
    await term.retire()
    await until(lambda: term.pool.refusals)
    assert term.members.progress["s1"].waits_for == "pool shard s2 does not answer"
    assert {move.target for move in term.record.moves} == {"s2"}
    term.pool.unreachable = frozenset()
    await until(lambda: "s1" not in term.members.known)
    assert (term.queue.shard[TASK], term.pool.at, term.pool.copies) == ("s2", "s2", set())
    assert {move.target for move in term.record.moves} == {"s2"}


async def test_the_open_move_of_a_cancelled_retirement_is_completed(term: Term) -> None:
    """Otherwise the target would keep its copies, and a later leader would read them."""
    term.pool.fail_mark = True
    await term.retire()
    await until(lambda: term.pool.refusals)
    await term.retire(cancel=True)
    assert term.members.retiring == frozenset()
    term.pool.unreachable = frozenset()
    await until(lambda: term.queue.shard[TASK] == "s2")
    assert not term.pool.copies and "s1" in term.members.known


async def test_groups_of_an_open_move_are_withheld_after_the_cancel(term: Term) -> None:
    """A rollout leased at the source would be lost with the mark, and a batch would miss its
    trajectories."""
    term.pool.fail_mark = True
    await term.retire()
    await until(lambda: term.pool.refusals)
    await term.retire(cancel=True)
    assert term.members.withheld == {"s1"}
    term.pool.unreachable = frozenset()
    await until(lambda: term.queue.shard[TASK] == "s2")
    await until(lambda: not term.members.withheld)


async def test_a_retirement_that_begins_again_does_not_move_leased_groups(term: Term) -> None:
    """Cancelled and repeated within one step, it still has the groups that it found before."""
    offered = set[frozenset[str]]()
    term.members.announce = lambda: offered.add(term.members.withheld)  # type: ignore[method-assign]
    amend = term.record.amend

    async def cancelled_in_between(**changes: Any) -> None:
        if "move" in changes and not term.record.moves:
            await term.retire(cancel=True)
            await term.retire()
        await amend(**changes)

    term.record.amend = cancelled_in_between  # type: ignore[method-assign]
    await term.retire()
    await until(lambda: term.members.known == {"s0", "s2"})
    assert offered == {frozenset({"s1"}), frozenset()}
    assert term.queue.shard[TASK] == "s2"


async def test_the_target_of_an_open_move_may_be_declared_lost(term: Term) -> None:
    """The groups then move to another shard."""
    term.pool.fail_mark = True
    await term.retire()
    await until(lambda: term.pool.refusals)
    await term.removals.ask(DeclareShardLost(shard="s2"), timeout_s=ASK_S)
    await until(lambda: term.queue.shard[TASK] == "s0")
    assert [move.target for move in term.record.moves] == ["s2", "s0"]
    await until(lambda: term.members.known == {"s0"})


async def test_move_waits_for_busy_groups_and_shows_them(term: Term) -> None:
    """They move once their rollouts have ended."""
    term.queue.busy = 1
    await term.retire()
    await until(lambda: term.members.progress["s1"].groups_busy)
    assert not term.record.moves
    term.queue.busy = 0
    await until(lambda: term.members.known == {"s0", "s2"})


REFUSALS = [
    pytest.param(MailboxFull("8192 messages waiting", retry_after_s=0.01), id="mailbox_full"),
    pytest.param(DeadlineExceeded("no answer", retry_after_s=0.01), id="deadline_exceeded"),
    pytest.param(Unavailable("not yet", retry_after_s=0.01), id="unavailable"),
]


@pytest.mark.parametrize("refusal", REFUSALS)
async def test_retirement_repeats_the_removal_until_the_queue_has_handled_it(
    term: Term, refusal: ForgeError
) -> None:
    """The shard has left the record by then, so nothing else would send it: the queue would ask the
    shard at every rewind of the term."""
    term.queue.errors[RemoveShard] = [refusal, refusal]
    await term.retire()
    await until(lambda: term.queue.removed)
    assert term.queue.removed == ["s1"] and term.members.known == {"s0", "s2"}


@pytest.mark.parametrize("refusal", REFUSALS)
async def test_declaration_repeats_the_removal_until_the_queue_has_handled_it(
    term: Term, refusal: ForgeError
) -> None:
    """A repeated command finds the shard gone, and would not send it."""
    term.pool.unreachable = frozenset({"s1"})
    term.queue.errors[RemoveShard] = [refusal, refusal]
    await term.removals.ask(DeclareShardLost(shard="s1"), timeout_s=ASK_S)
    assert term.queue.removed == ["s1"] and term.members.known == {"s0", "s2"}


@pytest.mark.parametrize("message", [FindMovable, GroupsMoved, RemoveShard])
async def test_retirement_ends_with_the_queue(term: Term, message: type) -> None:
    """Its term has ended; a task that repeats its message keeps the lock of the moves."""
    term.queue.stops_at = message
    await term.retire()
    await until(lambda: term.queue.stopped)
    await until(lambda: "retirement" not in {task.get_name() for task in asyncio.all_tasks()})
    term.pool.unreachable = frozenset({"s0"})
    with pytest.raises(ActorStopped, match="actor queue has stopped"):
        await term.removals.ask(DeclareShardLost(shard="s0"), timeout_s=ASK_S)
