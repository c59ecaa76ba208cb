"""Finding the one scheduler that serves: the elected leader."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from forge.runtime.coordination import Coordinator, Instance
from forge.runtime.rpc.channel import Channels
from forge.runtime.rpc.remote import Remote
from forge.v1.scheduler_pb2_grpc import SchedulerServiceStub

if TYPE_CHECKING:
    from forge.v1.scheduler_pb2_grpc import SchedulerServiceAsyncStub


def scheduler_remote(
    coordinator: Coordinator, channels: Channels
) -> Remote[SchedulerServiceAsyncStub]:
    """Some scheduler; every call also says `where=leads`, since only the leader answers."""
    return Remote(
        coordinator, channels, kind="scheduler", stub=SchedulerServiceStub, why_none=_why_none_leads
    )


def leads(instance: Instance) -> bool:
    """Whether a scheduler has told the others that it is the leader."""
    return instance.metadata.get("leader") == "true"


def _why_none_leads(instances: Sequence[Instance]) -> str:
    failed = [
        f"the last term of {instance.instance_id} failed: {instance.metadata['term_error']}"
        for instance in instances
        if "term_error" in instance.metadata
    ]
    return "; ".join(["no scheduler leads", *failed]) if failed else ""
