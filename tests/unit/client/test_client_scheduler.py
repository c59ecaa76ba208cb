"""The blocking client of the scheduler, which a thread uses while the event loop is blocked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from forge.client.scheduler import SyncScheduler, leads, scheduler_remote
from forge.core.errors import DeadlineExceeded, InvalidArgument, Unavailable
from forge.runtime.coordination import Instance
from forge.runtime.process.ports import free_ports
from forge.runtime.rpc import RpcServer
from forge.runtime.rpc.channel import Channels
from forge.runtime.security.credentials import Security
from forge.runtime.security.tokens import Keyring
from forge.v1 import scheduler_pb2 as pb
from forge.v1 import scheduler_pb2_grpc
from services.scheduler.service import FULL_NAME, SCOPES
from tests.support.agents.scripted_gateway import Instances

SECURITY = Security(Keyring.from_bytes(b"k" * 32), subject="runner-0")
REQUEST = pb.RenewRolloutsRequest(lease_ids=["t0:0:0"])
CALL_S = 60.0


class Scheduler(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Leads, or raises why it does not."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.calls: asyncio.Queue[Any] = asyncio.Queue()
        self.silent = False

    async def RenewRollouts(self, request: Any, context: Any) -> Any:
        self.calls.put_nowait(request)
        if self.silent:
            await asyncio.Event().wait()
        if self.error:
            raise self.error
        return pb.RenewRolloutsResponse(lost=request.lease_ids)


class Known:
    """A coordinator with these schedulers."""

    def __init__(self, *instances: Instance) -> None:
        self._instances = Instances(*instances)

    def discover(self, kind: str) -> Instances:
        return self._instances


@asynccontextmanager
async def schedulers(*servicers: Scheduler | None) -> AsyncIterator[SyncScheduler]:
    """A client that knows these; the first was the leader, and None is a process that has died."""
    async with AsyncExitStack() as undo:
        known = []
        for number, servicer in enumerate(servicers):
            address = f"127.0.0.1:{free_ports(1)[0]}"
            if servicer is not None:
                server = RpcServer(service="scheduler", host="127.0.0.1", port=0, security=SECURITY)
                server.add_service(
                    scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server,
                    servicer,
                    full_name=FULL_NAME,
                    scopes=SCOPES,
                )
                address = await server.start()
                undo.push_async_callback(server.stop, grace_s=0)
            known.append(
                Instance(
                    kind="scheduler",
                    instance_id=f"scheduler-{number}",
                    address=address,
                    metadata={"leader": "true"} if number == 0 else {},
                    revision=number,
                )
            )
        client = SyncScheduler(Known(*known), SECURITY)  # type: ignore[arg-type]
        undo.callback(client.close)
        yield client


async def renew(client: SyncScheduler) -> list[str]:
    response = await asyncio.to_thread(client.call, "RenewRollouts", REQUEST, timeout_s=CALL_S)
    return list(response.lost)


async def test_scheduler_call_from_a_thread_reaches_the_leader() -> None:
    """Not the standbys."""
    leader, standby = Scheduler(), Scheduler()
    async with schedulers(leader, standby) as client:
        assert await renew(client) == ["t0:0:0"]
    assert standby.calls.empty()


@pytest.mark.parametrize("before", [None, Scheduler(Unavailable("does not lead any more"))])
async def test_thread_finds_the_next_leader_by_itself(before: Scheduler | None) -> None:
    """Discovery, which belongs to the event loop, still shows the earlier leader."""
    async with schedulers(before, Scheduler(Unavailable("stands by")), Scheduler()) as client:
        assert await renew(client) == ["t0:0:0"]


async def test_refusal_by_the_leader_is_final() -> None:
    """No other scheduler would accept the call."""
    standby = Scheduler()
    async with schedulers(Scheduler(InvalidArgument("lease_ids")), standby) as client:
        with pytest.raises(InvalidArgument, match="lease_ids"):
            await renew(client)
    assert standby.calls.empty()


async def test_call_without_a_leader_raises_the_last_leaders_error() -> None:
    """Or, with no scheduler known, that."""
    async with schedulers(Scheduler(DeadlineExceeded("first")), Scheduler(Unavailable("b"))) as one:
        with pytest.raises(DeadlineExceeded, match="first"):
            await renew(one)
    async with schedulers() as none:
        with pytest.raises(Unavailable, match="no scheduler is known"):
            await renew(none)


async def test_closing_ends_a_waiting_call() -> None:
    """A process that ends does not wait for a hung scheduler."""
    silent = Scheduler()
    silent.silent = True
    async with schedulers(silent) as client:
        waiting = asyncio.create_task(renew(client))
        await silent.calls.get()
        client.close()
        with pytest.raises(Unavailable):
            await waiting


async def test_standbys_without_a_leader_are_the_reason() -> None:
    """The line names the failed term, if there is one; without schedulers it does not speak of a
    leader."""
    standby = Instance(
        kind="scheduler", instance_id="scheduler-0", address="a:1", metadata={}, revision=1
    )
    failed = replace(standby, metadata={"term_error": "no pool"})
    for known, end in (
        ([standby], ": no scheduler leads"),
        ([failed], ": no scheduler leads; the last term of scheduler-0 failed: no pool"),
        ([], "no fitting instance after 0 s"),
    ):
        channels = Channels(SECURITY)
        remote = scheduler_remote(Known(*known), channels)  # type: ignore[arg-type]
        with pytest.raises(Unavailable) as refused:
            await remote.pick(timeout_s=0.0, where=leads)
        assert str(refused.value).endswith(end)
        await channels.close()
