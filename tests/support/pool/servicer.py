"""A pool servicer of one store, without the parts that its test does not need."""

from __future__ import annotations

from forge.runtime.actors.actor_system import ActorRef
from services.pool.actors.writer import WriterRef
from services.pool.erasure import Erasure
from services.pool.group_mover import GroupMover
from services.pool.maintenance.compaction import Compactor
from services.pool.readers import ReaderRef, ReaderThreads
from services.pool.retention import Retention
from services.pool.service import PoolServicer, WriteLimits
from services.pool.store import PoolStore
from tests.support.runtime.unused import unused


def make_servicer(
    store: PoolStore, *, writer: WriterRef | None = None, readers: ReaderRef | None = None
) -> PoolServicer:
    """Without `writer` every write fails the test, and without `readers` every read."""
    return PoolServicer(
        store,
        writer or unused(ActorRef),
        readers or unused(ReaderThreads),
        unused(Compactor),
        unused(Erasure),
        unused(GroupMover),
        unused(Retention),
        WriteLimits(max_turn_bytes=1),
    )
