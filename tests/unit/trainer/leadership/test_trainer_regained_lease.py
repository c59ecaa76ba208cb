"""A trainer that loses its lease in etcd: it leads again, or another one does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

import msgspec
import pytest

from forge.runtime.concurrency.tasks import cancel_and_wait
from forge.runtime.coordination import Coordinator, Leadership, Versioned
from services.trainer.leadership.lineage import RECORD_KEY, Lineage, LineageRecord
from tests.support.runtime.waiting import settle, until


class Lease(Leadership):
    """Stands in for a leadership; the test ends it."""

    def __init__(self, fence: int) -> None:
        self.fence = fence
        self.ended = asyncio.Event()

    @property
    def alive(self) -> bool:
        return not self.ended.is_set()

    async def lost(self) -> None:
        await self.ended.wait()

    async def raise_above(self, fence: int) -> None:
        assert fence < self.fence


@dataclass
class Etcd(Coordinator):
    """Stands in for the coordinator: the record, and the leases of this trainer."""

    record: LineageRecord
    fences: list[int]
    leases: list[Lease] = field(default_factory=list)

    async def get(self, key: str) -> Versioned | None:
        found = Versioned(value=msgspec.json.encode(self.record), mod_revision=1)
        return found if key == RECORD_KEY else None

    async def campaign(self, name: str, instance_id: str, *, ttl_s: float = 5.0) -> Lease:
        self.leases.append(Lease(self.fences[len(self.leases)]))
        return self.leases[-1]

    async def follow(self, key: str) -> AsyncGenerator[Versioned | None, None]:
        yield None
        await asyncio.Event().wait()


@pytest.mark.parametrize(("recorded", "is_superseded"), [(3, False), (8, True)])
async def test_trainer_that_has_not_begun_regains_its_lease(
    recorded: int, is_superseded: bool
) -> None:
    """The trainer leads again if the record has an earlier fence. A later fence is that of another
    trainer, which led meanwhile."""
    etcd = Etcd(LineageRecord(lineage="a", fence=recorded), [7, 9])
    lineage = Lineage(etcd, trainer="t 1", location="h:/c", start_over="", ttl_s=5.0)
    await lineage.campaign(lambda: None)
    superseded = asyncio.create_task(lineage.superseded())
    await settle()
    etcd.leases[0].ended.set()
    await until(lambda: len(etcd.leases) == 2)
    await settle()
    assert superseded.done() == is_superseded
    assert lineage.fence == 9
    await cancel_and_wait(superseded)
