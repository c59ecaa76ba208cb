"""The queue on /metrics."""

from __future__ import annotations

from unittest.mock import AsyncMock

from prometheus_client import REGISTRY

from forge.runtime.coordination import Coordinator, Leadership
from forge.v1 import scheduler_pb2
from services.scheduler import metrics
from services.scheduler.config import SchedulerConfig
from services.scheduler.leadership.standby import ShardCopies
from services.scheduler.leadership.term import Term
from services.scheduler.shards.pool_shards import PoolShards
from tests.support.runtime.unused import unused


class Resigned(Leadership):
    """The leadership of a term that ends."""

    def __init__(self) -> None:
        self.fence = 1

    @property
    def alive(self) -> bool:
        return False

    async def resign(self) -> None: ...


def shown(name: str, **labels: str) -> float | None:
    found: float | None = REGISTRY.get_sample_value(f"forge_scheduler_{name}", labels)
    return found


async def test_deposed_leader_shows_no_queue_metrics() -> None:
    """A sum over instances would add its last counts to those of the next leader."""
    metrics.show(
        scheduler_pb2.GetSchedulerStatusResponse(
            accepted=5,
            trained=2,
            pending=3,
            head=2,
            activity=scheduler_pb2.ACTIVITY_PAUSED,
            domains=[scheduler_pb2.DomainStatus(domain="code", completed_rollouts=7)],
        )
    )
    assert shown("groups", state="accepted") == 5
    assert shown("activity", state="paused") == 1
    assert shown("completed_rollouts", domain="code") == 7
    leadership = Resigned()
    await Term(
        SchedulerConfig(),
        unused(Coordinator),
        leadership,
        unused(PoolShards),
        unused(ShardCopies),
        awaiting=AsyncMock(),
    ).end()
    assert shown("groups", state="accepted") == shown("head") == 0
    assert shown("activity", state="paused") == 0
    assert shown("completed_rollouts", domain="code") is None
