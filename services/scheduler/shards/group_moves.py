"""Moves groups from one pool shard to another, so that one of the two is always authoritative.

    1. the move is written to the term record
    2. the target imports the groups                       the source is authoritative
    3. the source marks those that did not change as MOVED the target is authoritative

A leader that takes over repeats 2 and 3 before it scans either shard, so no group is read twice.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from forge.core.errors import Conflict, DataLoss, Unavailable
from forge.runtime.rpc.chunks import batched
from forge.runtime.telemetry import log
from forge.v1 import pool_pb2
from services.scheduler.shards.pool_shards import PoolShards
from services.scheduler.term_record import Move, OwnRecord

MOVE_GROUPS = 64
"""Most groups of one move."""


class GroupMoves:
    """The moves of one term."""

    def __init__(self, shards: PoolShards, record: OwnRecord) -> None:
        self._shards = shards
        self._record = record
        self.damaged: set[str] = set()
        """Groups that cannot move: their records are damaged at the source."""

    async def begin(self, move: Move) -> None:
        """Write the move to the term record. The one before it is complete. Raises Unavailable."""
        await self._record.amend(move=move)

    async def complete(self, move: Move) -> Collection[str]:
        """Import and mark until no group is in between; the tasks whose groups are on the target.
        Raises Unavailable."""
        moved: set[str] = set()
        left = [task_id for task_id in move.task_ids if task_id not in self.damaged]
        while left:
            digests = await self._import(move, left)
            found = {group.task_id for group in digests}
            # An empty digest asks for a group that moved before.
            absent = [pool_pb2.GroupDigest(task_id=task) for task in left if task not in found]
            moved |= await self._shards.mark_moved(move.source, move.target, [*digests, *absent])
            gone = [group.task_id for group in absent if group.task_id not in moved]
            if gone:
                log.warning("groups_not_moved", pool_shard=move.source, tasks=gone)
            # Those that changed since their import are imported again.
            left = [task_id for task_id in found if task_id not in moved]
        return moved

    async def _import(self, move: Move, left: Sequence[str]) -> Sequence[pool_pb2.GroupDigest]:
        try:
            return await self._shards.import_groups(move.target, move.source, left)
        except Conflict as error:
            # They changed during the copy: each alone is copied faster.
            log.info("groups_changed_while_moving", error=str(error))
            if len(left) == 1:
                raise Unavailable(str(error)) from error
        except DataLoss as error:
            log.error("group_not_movable", pool_shard=move.source, error=str(error))
            if len(left) == 1:
                self.damaged.add(left[0])
                return ()
        return [digest for task_id in left for digest in await self._import(move, (task_id,))]


def chunks_by_target(
    task_ids: Sequence[str], target_of: Callable[[str], str]
) -> list[tuple[str, tuple[str, ...]]]:
    """The tasks in parts of at most `MOVE_GROUPS`, each with its target."""
    by_target: dict[str, list[str]] = {}
    for task_id in task_ids:
        by_target.setdefault(target_of(task_id), []).append(task_id)
    return [
        (target, tuple(part))
        for target, tasks in by_target.items()
        for part in batched(tasks, MOVE_GROUPS)
    ]
