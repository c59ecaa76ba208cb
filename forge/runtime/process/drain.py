"""Drain of an instance by an operator: it stays registered, and gets no new work.

Owns the RPC and the mark in discovery. Readers decide the meaning of the mark: routers leave a
marked worker out. Not here: the drain of a runner, which the scheduler owns; the drain at the end
of a process (`service`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from forge.core.errors import ForgeError
from forge.runtime.process.service import ServiceContext
from forge.runtime.telemetry import gauge, log
from forge.v1 import drain_pb2 as pb
from forge.v1 import drain_pb2_grpc as rpc

DRAINING_KEY = "draining"
"""Metadata of an instance that an operator drains; "1"."""
FULL_NAME = "forge.v1.DrainService"
SCOPES = {"SetDraining": "operator"}
AUDITED = frozenset({"SetDraining"})
DRAINING = gauge("forge_draining", "1 while an operator drains this instance.")


class DrainServicer(rpc.DrainServiceServicer):
    """Drains one instance."""

    def __init__(self, context: ServiceContext, *, running: Callable[[], int]) -> None:
        """`running` counts the work in flight."""
        self._context = context
        self._running = running

    async def SetDraining(  # noqa: N802 - named by the proto
        self, request: pb.SetDrainingRequest, context: Any
    ) -> pb.SetDrainingResponse:
        """Marks the instance in discovery. Raises `Unavailable` without etcd."""
        metadata = self._context.metadata
        before = dict(metadata)
        metadata.pop(DRAINING_KEY, None)
        if request.draining:
            metadata[DRAINING_KEY] = "1"
        if metadata != before:
            try:
                await self._context.announce()
            except ForgeError:
                # The next announcement has the mark of before.
                metadata.pop(DRAINING_KEY, None)
                if DRAINING_KEY in before:
                    metadata[DRAINING_KEY] = before[DRAINING_KEY]
                raise
            DRAINING.set(request.draining)
            log.info("drain_begun" if request.draining else "drain_ended")
        return pb.SetDrainingResponse(draining=request.draining, running=self._running())


def serve_drain(context: ServiceContext, *, running: Callable[[], int]) -> None:
    """Add the RPC to the process's server."""
    context.server.add_service(
        rpc.add_DrainServiceServicer_to_server,
        DrainServicer(context, running=running),
        full_name=FULL_NAME,
        scopes=SCOPES,
        audited=AUDITED,
    )
