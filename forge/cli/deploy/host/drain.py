"""Drains one instance: it gets no new work, and the command waits for the work in flight."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from forge.cli.connection import Connection, person
from forge.cli.queue.runner_drain import drain_runner, report
from forge.client.operator import Operator
from forge.core.errors import NotFound
from forge.runtime.rpc.channel import Channels
from forge.runtime.rpc.status import translated
from forge.v1 import drain_pb2, drain_pb2_grpc

_CALL_S = 10.0
_PAUSE_S = 0.5


async def drain_instance(at: Connection, instance: str, *, resume: bool, wait_s: float) -> str:
    """Set the drain of an instance; return a line with the work that still runs after `wait_s`.

    Raises `NotFound` for an instance that is not in discovery, `Unavailable`.
    """
    async with at.open() as (coordinator, channels):
        found = [one for one in await coordinator.all_instances() if one.instance_id == instance]
        if not found:
            raise NotFound(f"instance {instance} is not in discovery; forge status lists all")
        if found[0].kind == "runner":
            operator = Operator(coordinator, channels)
            left = await drain_runner(operator, instance, resume=resume, wait_s=wait_s)
            return report(instance, left, resume=resume)
        running = await _drain_worker(channels, found[0].address, resume=resume, wait_s=wait_s)
        return f"{instance}: {'serves again' if resume else f'{running} still run'}"


async def _drain_worker(channels: Channels, address: str, *, resume: bool, wait_s: float) -> int:
    request = drain_pb2.SetDrainingRequest(draining=not resume, on_behalf_of=person())
    deadline_s = time.monotonic() + wait_s
    stub: Any = channels.stub(drain_pb2_grpc.DrainServiceStub, address)
    while True:
        async with translated():
            answer = await stub.SetDraining(request, timeout=_CALL_S)
        if resume or not answer.running or time.monotonic() >= deadline_s:
            return int(answer.running)
        await asyncio.sleep(_PAUSE_S)
