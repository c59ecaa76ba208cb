"""Declares a pool shard lost: its groups get records on other shards, and pending ones a tombstone.

Owns the order. Counts first, records second, the mark in etcd third: before the mark the shard may
return, and a repeated command completes what was begun.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from forge.core.errors import FailedPrecondition
from forge.core.placement.sharding import choose_shard
from forge.core.queue.groups import Phase
from forge.runtime.actors.actor_system import ActorRef
from forge.runtime.coordination import Coordinator
from forge.runtime.coordination.shard_record import LOST, mark_gone, read_record
from forge.runtime.rpc.chunks import batched
from forge.runtime.telemetry import log
from forge.v1 import common_pb2, scheduler_pb2
from services.scheduler.actors.delivery import ask_until_handled
from services.scheduler.shards.pool_shards import GroupStateChange, PoolShards
from services.scheduler.shards.shard_membership import ShardMembership
from services.scheduler.state.messages.groups import DropGroups
from services.scheduler.state.messages.removals import GroupsMoved, GroupsOn, OnShard, RemoveShard
from services.scheduler.state.stored_group import PHASES
from services.scheduler.term_record import Move, OwnRecord

ASK_S = 30.0
WRITE_S = 60.0
PART_GROUPS = 4096
REASON = "shard_lost"
"""Begin of the reason of each tombstone."""


@dataclass(eq=False, slots=True)
class LostShards:
    """The declarations of one term."""

    queue: ActorRef
    commits: ActorRef
    shards: PoolShards
    membership: ShardMembership
    coordinator: Coordinator
    record: OwnRecord

    async def declare(self, shard: str) -> scheduler_pb2.DeclareShardLostResponse:
        """Raises NotFound, FailedPrecondition, Unavailable."""
        stored, _ = await read_record(self.coordinator, shard)
        if shard not in self.membership.known and stored is not None and stored.gone == LOST:
            return scheduler_pb2.DeclareShardLostResponse()
        self.membership.require_known(shard)
        self._check_absent(shard)
        found: OnShard = await self._ask(GroupsOn(shard=shard))
        await self._keep_counts(shard, found)
        await self._take_over_move(shard)
        found = await self._ask(GroupsOn(shard=shard))
        await self._store_elsewhere(shard, found.records)
        pending = [each.task.task_id for each in found.records if each.state not in PHASES]
        tombstoned = await self._tombstone(shard, pending)
        # It may have started meanwhile; once marked it is refused.
        self._check_absent(shard)
        if stored is not None:
            self.shards.forget_store(stored.lineage)
        lineage = "" if stored is None else stored.lineage
        await mark_gone(self.coordinator, shard, gone=LOST, lineage=lineage, now_unix_s=time.time())
        await self.record.remove_shards({shard})
        self.membership.remove(shard)
        # A repeated command finds the shard gone, and does not send this again.
        await ask_until_handled(self.queue, RemoveShard(shard=shard))
        settled = len(found.records) - len(pending) + sum(found.forgotten.values())
        log.warning("pool_shard_lost", pool_shard=shard, tombstoned=tombstoned, settled=settled)
        return scheduler_pb2.DeclareShardLostResponse(tombstoned=tombstoned, settled=settled)

    def _check_absent(self, shard: str) -> None:
        live = self.shards.live()
        if shard in live:
            raise FailedPrecondition(
                f"pool shard {shard} is in discovery: retire it with `forge pool retire {shard}`, "
                "or stop its instance first"
            )
        if not self.membership.placeable(live):
            raise FailedPrecondition(
                f"no pool shard is registered for the tombstones of {shard}: start one first"
            )

    async def _keep_counts(self, shard: str, found: OnShard) -> None:
        """Stores the counts of settled groups that have no record elsewhere. A shard that was not
        read in this term has none here; an earlier leader may have stored them."""
        record = await self.record.read()
        if shard in self.membership.registered or shard not in record.losing:
            counts = {
                count_key(evaluation, phase): groups
                for (evaluation, phase), groups in found.forgotten.items()
            }
            await self.record.amend(losing={**record.losing, shard: counts})

    async def _take_over_move(self, shard: str) -> None:
        """Groups that a retirement had copied from the lost shard are not lost; those that it had
        moved there are."""
        move = (await self.record.read()).move
        if move is None or shard not in (move.source, move.target):
            return
        if move.target == shard:
            await self._count_as_moved(move)
            return
        known, _ = await self.shards.look_up({move.target}, task_ids=move.task_ids, batch_ids=())
        moved = [task_id for task_id in move.task_ids if task_id in known]
        self.shards.relocate(moved, move.target)
        await self._relocate(Move(source=shard, target=move.target, task_ids=tuple(moved)))

    async def _count_as_moved(self, move: Move) -> None:
        if move.source not in self.membership.registered:
            return
        known, _ = await self.shards.look_up({move.source}, task_ids=move.task_ids, batch_ids=())
        gone = common_pb2.GROUP_STATE_MOVED
        moved = [
            task_id
            for task_id, group in known.items()
            if group.state == gone and group.reason == move.target
        ]
        await self._relocate(replace(move, task_ids=tuple(moved)))

    async def _store_elsewhere(self, shard: str, records: Sequence[common_pb2.GroupRecord]) -> None:
        placeable = self.membership.placeable(self.shards.live())
        by_target: defaultdict[str, list[common_pb2.GroupRecord]] = defaultdict(list)
        for record in records:
            by_target[choose_shard(record.task.task_id, placeable)].append(record)
        for target, groups in by_target.items():
            for part in batched(groups, PART_GROUPS):
                await self.shards.put_groups(target, map(partial(_placed, target), part))
                task_ids = tuple(group.task.task_id for group in part)
                self.shards.relocate(task_ids, target)
                settled = [_change(group) for group in part if group.state in PHASES]
                await self.shards.set_states({target: settled} if settled else {})
                await self._relocate(Move(source=shard, target=target, task_ids=task_ids))

    async def _relocate(self, move: Move) -> None:
        moved = dict.fromkeys(move.task_ids)
        await self._ask(GroupsMoved(moved=moved, source=move.source, target=move.target))

    async def _tombstone(self, shard: str, task_ids: Sequence[str]) -> int:
        reason = f"{REASON}: pool shard {shard} was declared lost"
        tombstoned = 0
        for part in batched(task_ids, PART_GROUPS):
            drop = DropGroups(task_ids=tuple(part), reason=reason)
            tombstoned += await self.commits.ask(drop, timeout_s=WRITE_S)
        return tombstoned

    async def _ask(self, message: Any) -> Any:
        return await self.queue.ask(message, timeout_s=ASK_S)


def count_key(evaluation: bool, phase: Phase) -> str:
    """The name of a counter in the term record."""
    return f"{'eval' if evaluation else 'train'}/{phase.value}"


def parse_count_key(key: str) -> tuple[bool, Phase]:
    """(evaluation, phase) of a counter."""
    purpose, _, phase = key.partition("/")
    return purpose == "eval", Phase(phase)


def _placed(shard: str, record: common_pb2.GroupRecord) -> common_pb2.GroupRecord:
    placed = common_pb2.GroupRecord()
    placed.CopyFrom(record)
    placed.pool_shard = shard
    return placed


def _change(record: common_pb2.GroupRecord) -> GroupStateChange:
    return GroupStateChange(
        task_id=record.task.task_id,
        state=record.state,
        batch_id=record.batch_id,
        step=record.step,
        reason=record.reason,
    )
