"""Removes pool shards: those that an operator retires, and those that are lost for good.

Owns the retirement: pending groups without leases move first, then settled ones; when none is left
the shard's record in etcd is marked and the shard leaves the term. One task moves groups, so
neither commits nor leases wait for a copy.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from forge.core.errors import ActorStopped, FailedPrecondition, ForgeError, Unavailable
from forge.core.placement.sharding import choose_shard
from forge.core.queue.groups import Phase
from forge.runtime.actors.actor import Actor
from forge.runtime.actors.actor_system import ActorRef
from forge.runtime.concurrency.tasks import cancel_and_wait
from forge.runtime.coordination import Coordinator
from forge.runtime.coordination.shard_record import RETIRED, mark_gone, read_record
from forge.runtime.telemetry import log
from forge.v1 import common_pb2, pool_pb2, scheduler_pb2
from services.scheduler import metrics
from services.scheduler.actors.delivery import ask_until_handled
from services.scheduler.actors.lost_shards import LostShards
from services.scheduler.shards.group_moves import GroupMoves, chunks_by_target
from services.scheduler.shards.pool_shards import PoolShards
from services.scheduler.shards.shard_membership import ShardMembership
from services.scheduler.state.messages.removals import (
    DeclareShardLost,
    FindMovable,
    GroupsMoved,
    Movable,
    RemoveShard,
    RetireShard,
)
from services.scheduler.state.stored_group import PHASES
from services.scheduler.term_record import Move, OwnRecord

ASK_S = 30.0
PAUSE_S = 0.5
"""Between two looks at groups that cannot move yet."""
MOST_PENDING = 65_536
"""Pending groups found in one look, which walks over all groups in memory."""
MOST_SETTLED = 1000
_Settled = Mapping[str, tuple[bool, Phase] | None]


class ShardRemovals(Actor):
    """Retires pool shards, and declares them lost."""

    def __init__(
        self,
        queue: ActorRef,
        commits: ActorRef,
        shards: PoolShards,
        membership: ShardMembership,
        coordinator: Coordinator,
        record: OwnRecord,
    ) -> None:
        self._queue = queue
        self._shards = shards
        self._membership = membership
        self._coordinator = coordinator
        self._record = record
        self._moves = GroupMoves(shards, record)
        self._lost = LostShards(queue, commits, shards, membership, coordinator, record)
        self._open: tuple[Move, _Settled] | None = None
        """The move that has begun; it is completed before another one, as its target may have
        copies that only the mark at the source makes authoritative."""
        self._retiring: asyncio.Task[None] | None = None
        self._moving = asyncio.Lock()
        """A shard is not declared lost in the middle of a move."""

    async def started(self) -> None:
        """Continues the retirements of earlier terms."""
        self._continue()

    async def stopped(self) -> None:
        """Ends the task; the next leader continues."""
        metrics.GROUPS_TO_MOVE.set(0)
        await cancel_and_wait(self._retiring)

    async def receive(self, message: Any) -> Any:
        """Handles RetireShard and DeclareShardLost."""
        match message:
            case RetireShard(shard=shard, cancel=True):
                return await self._cancel(shard)
            case RetireShard(shard=shard):
                return await self._retire(shard)
            case DeclareShardLost(shard=shard):
                async with self._moving:
                    return await self._lost.declare(shard)
            case _:
                return await super().receive(message)

    # Requests

    async def _retire(self, shard: str) -> scheduler_pb2.RetireShardResponse:
        members = self._membership
        if shard not in members.retiring:
            if await self._is_retired(shard):
                state = scheduler_pb2.RETIREMENT_STATE_RETIRED
                return scheduler_pb2.RetireShardResponse(state=state)
            self._check_retirable(shard)
            await self._record.amend(retiring=members.retiring | {shard})
            members.set_retiring(members.retiring | {shard})
            log.info("pool_shard_retires", pool_shard=shard)
            listed = await self._shards.list_to_move(shard, limit=0)
            self._report(shard, left=listed.groups_left)
        self._continue()
        return scheduler_pb2.RetireShardResponse(
            state=scheduler_pb2.RETIREMENT_STATE_RETIRING, progress=members.progress[shard]
        )

    async def _cancel(self, shard: str) -> scheduler_pb2.RetireShardResponse:
        members = self._membership
        if shard not in members.retiring:
            raise FailedPrecondition(f"pool shard {shard} does not retire")
        await self._record.amend(retiring=members.retiring - {shard})
        members.set_retiring(members.retiring - {shard})
        log.info("retirement_cancelled", pool_shard=shard)
        state = scheduler_pb2.RETIREMENT_STATE_CANCELLED
        return scheduler_pb2.RetireShardResponse(state=state)

    async def _is_retired(self, shard: str) -> bool:
        stored, _ = await read_record(self._coordinator, shard)
        if stored is None or not stored.gone or shard in self._membership.known:
            return False
        if stored.gone == RETIRED:
            return True
        raise FailedPrecondition(f"pool shard {shard} {stored.gone_text}")

    def _check_retirable(self, shard: str) -> None:
        members, live = self._membership, self._shards.live()
        members.require_known(shard)
        if shard not in members.registered & live:
            raise FailedPrecondition(
                f"pool shard {shard} is unreachable: start it, or, if its disk is lost, run "
                f"`forge pool declare-lost {shard}`"
            )
        if not members.placeable(live) - {shard}:
            raise FailedPrecondition(
                f"pool shard {shard} is the only one that takes groups: start another shard first"
            )

    # The task

    def _continue(self) -> None:
        if self._membership.retiring and (self._retiring is None or self._retiring.done()):
            self._retiring = asyncio.create_task(self._run(), name="retirement")

    async def _run(self) -> None:
        try:
            await self._retire_all()
        except ActorStopped as error:
            # The term has ended; the next leader continues.
            log.info("retirement_stopped", error=str(error))

    async def _retire_all(self) -> None:
        while self._membership.retiring or self._open is not None:
            if not self._membership.retiring:
                await self._end_open()
            for shard in sorted(self._membership.retiring):
                try:
                    async with self._moving_from(shard):
                        rests = await self._step(shard)
                except ActorStopped:
                    raise
                except ForgeError as error:
                    log.warning("retirement_delayed", pool_shard=shard, error=str(error))
                    self._report(shard, waits_for=str(error))
                    rests = True
                if rests:
                    await asyncio.sleep(PAUSE_S)

    @asynccontextmanager
    async def _moving_from(self, *sources: str) -> AsyncIterator[None]:
        """Moves groups of `sources`. They are withheld from runners and trainers until the step is
        over and no move is open, also if the retirement is cancelled meanwhile."""
        async with self._moving:
            self._membership.set_moving(self._open_source().union(sources))
            try:
                yield
            finally:
                self._membership.set_moving(self._open_source())

    def _open_source(self) -> frozenset[str]:
        return frozenset() if self._open is None else frozenset({self._open[0].source})

    async def _end_open(self) -> None:
        """Completes the last move of a cancelled retirement."""
        try:
            async with self._moving_from():
                await self._complete_open()
        except ActorStopped:
            raise
        except ForgeError as error:
            log.warning("move_delayed", error=str(error))
            await asyncio.sleep(PAUSE_S)

    async def _step(self, shard: str) -> bool:
        """Moves some groups; whether the next ones are to be waited for."""
        if shard not in self._membership.retiring:
            return False
        await self._complete_open()
        found: Movable = await self._ask(FindMovable(shard=shard, most=MOST_PENDING))
        task_ids = [each for each in found.task_ids if each not in self._moves.damaged]
        if task_ids:
            await self._move_all(shard, dict.fromkeys(task_ids), busy=found.busy)
            return False
        listed = await self._shards.list_to_move(shard, limit=MOST_SETTLED)
        self._report(shard, left=listed.groups_left, busy=found.busy)
        if not listed.groups_left:
            await self._finish(shard)
            return False
        settled: dict[str, tuple[bool, Phase] | None] = {
            group.task_id: _settled(group)
            for group in listed.groups
            if group.state in PHASES and group.task_id not in self._moves.damaged
        }
        if not settled and not found.busy:
            settled = await self._unknown(shard, listed)
        if settled:
            await self._move_all(shard, settled, busy=found.busy)
        elif self._moves.damaged:
            names = ", ".join(sorted(self._moves.damaged)[:8])
            raise Unavailable(
                f"{len(self._moves.damaged)} groups are damaged: {names}. Repair them: forge pool "
                "check DIR --repair COPY"
            )
        return not settled

    async def _unknown(
        self, shard: str, listed: pool_pb2.ListGroupsToMoveResponse
    ) -> dict[str, tuple[bool, Phase] | None]:
        """Pending groups of the pool that are not in memory: their submission ended in doubt."""
        ids = [group.task_id for group in listed.groups if group.task_id not in self._moves.damaged]
        found: Movable = await self._ask(FindMovable(shard=shard, most=0, listed=ids))
        return dict.fromkeys(found.unknown)

    async def _move_all(self, shard: str, groups: _Settled, *, busy: int) -> None:
        live = self._shards.live()
        placeable = self._membership.placeable(live)
        if not placeable:
            raise Unavailable("no other pool shard takes groups: start one")
        chunks = chunks_by_target(tuple(groups), lambda task_id: choose_shard(task_id, placeable))
        for target, task_ids in chunks:
            if shard not in self._membership.retiring:
                return
            # Look-ups ask the target from now on.
            redirect = GroupsMoved(moved={}, source=shard, target=target)
            await ask_until_handled(self._queue, redirect)
            move = Move(source=shard, target=target, task_ids=task_ids)
            await self._moves.begin(move)
            self._open = move, groups
            moved = await self._complete_open()
            if (progress := self._membership.progress.get(shard)) is not None:
                self._report(shard, left=max(0, progress.groups_left - moved), busy=busy)

    async def _complete_open(self) -> int:
        """Complete the open move; return the number of groups moved. Raises Unavailable."""
        if self._open is None:
            return 0
        move, groups = self._open
        if not {move.source, move.target} <= self._membership.known:
            # One was declared lost; that has settled the move.
            self._open = None
            return 0
        moved = await self._moves.complete(move)
        self._shards.relocate([each for each in moved if groups[each] is None], move.target)
        relocated = GroupsMoved(
            moved={each: groups[each] for each in moved}, source=move.source, target=move.target
        )
        await ask_until_handled(self._queue, relocated)
        self._open = None
        metrics.MOVED_GROUPS.inc(len(moved))
        return len(moved)

    async def _finish(self, shard: str) -> None:
        stored, _ = await read_record(self._coordinator, shard)
        if stored is not None:
            self._shards.forget_store(stored.lineage)
            await mark_gone(
                self._coordinator,
                shard,
                gone=RETIRED,
                lineage=stored.lineage,
                now_unix_s=time.time(),
            )
        await self._record.remove_shards({shard})
        self._membership.remove(shard)
        await ask_until_handled(self._queue, RemoveShard(shard=shard))
        metrics.GROUPS_TO_MOVE.set(0)
        log.info("pool_shard_retired", pool_shard=shard)

    def _report(
        self, shard: str, *, left: int | None = None, busy: int = 0, waits_for: str = ""
    ) -> None:
        progress = self._membership.progress
        if (before := progress.get(shard)) is None:
            return
        progress[shard] = scheduler_pb2.ShardRetirement(
            pool_shard=shard,
            groups_left=before.groups_left if left is None else left,
            groups_busy=busy,
            waits_for=waits_for,
        )
        metrics.GROUPS_TO_MOVE.set(sum(each.groups_left for each in progress.values()))

    async def _ask(self, message: Any) -> Any:
        return await self._queue.ask(message, timeout_s=ASK_S)


def _settled(group: pool_pb2.ListGroupsToMoveResponse.Group) -> tuple[bool, Phase]:
    return group.purpose == common_pb2.PURPOSE_EVAL, PHASES[group.state]
