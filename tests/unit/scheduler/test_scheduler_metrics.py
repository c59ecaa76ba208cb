"""The queue on /metrics."""

from __future__ import annotations

from prometheus_client import REGISTRY

from forge.v1 import scheduler_pb2
from services.scheduler import metrics
from services.scheduler.config import SchedulerConfig
from services.scheduler.leadership.term import Term


class Leadership:
    """What a term gives up at its end."""

    alive = False
    fence = 1

    async def resign(self) -> None: ...


def shown(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(f"forge_scheduler_{name}", labels)


async def test_instance_that_leads_no_more_shows_no_queue() -> None:
    """Else a sum over instances would add its last counts to those of the next leader."""
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
    await Term(SchedulerConfig(), None, Leadership(), None, None, awaiting=None).end()
    assert shown("groups", state="accepted") == shown("head") == 0
    assert shown("activity", state="paused") == 0
    assert shown("completed_rollouts", domain="code") is None
