"""Leased keys with one live owner, over a real etcd."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from forge.core.errors import Conflict
from forge.runtime.coordination import Coordinator, Owner
from tests.support.runtime.etcd import EtcdServer

LIVE = Owner.of(os.getppid())
"""Another process of this host that outlives the test."""
ELSEWHERE = replace(LIVE, host="another host")


def ended() -> Owner:
    """A process of this host that runs no more."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        owner = Owner.of(process.pid)
        assert not owner.has_ended
        process.communicate(b"\n")
    return owner


async def test_instance_id_of_a_live_process_is_refused(coordinator: Coordinator) -> None:
    """The refusal names the id and the address of its holder, whose entry stays."""
    await coordinator.register("gateway", "g", "h:1", ttl_s=600, owner=LIVE)
    with pytest.raises(Conflict, match=r"instance_id 'g' is taken: a live gateway at h:1"):
        await coordinator.register("gateway", "g", "h:2", ttl_s=600)
    (entry,) = await coordinator.discover("gateway").wait(timeout_s=60)
    assert entry.address == "h:1"


async def test_entry_of_an_ended_process_is_replaced(coordinator: Coordinator) -> None:
    """A restart after kill -9 on the same host does not wait for the earlier lease, which here ends
    long after the test."""
    await coordinator.register("gateway", "g", "h:1", ttl_s=600, owner=ended())
    await coordinator.register("gateway", "g", "h:2", ttl_s=600)
    await coordinator.discover("gateway").wait(
        timeout_s=60, where=lambda instance: instance.address == "h:2"
    )


async def test_start_waits_for_the_entry_of_another_host(coordinator: Coordinator) -> None:
    """A process elsewhere may have died: the end of its lease lets the next one in."""
    first = await coordinator.register("gateway", "g", "h:1", ttl_s=600, owner=ELSEWHERE)
    second = asyncio.create_task(coordinator.register("gateway", "g", "h:2", ttl_s=600))
    await coordinator.discover("gateway").wait(timeout_s=60)
    assert not second.done()
    await first.close()
    await second
    await coordinator.discover("gateway").wait(
        timeout_s=60, where=lambda instance: instance.address == "h:2"
    )


async def test_renewed_entry_of_another_host_is_refused(coordinator: Coordinator) -> None:
    """A lease that outlives its TTL belongs to a live process."""
    await coordinator.register("gateway", "g", "h:1", ttl_s=1, owner=ELSEWHERE)
    with pytest.raises(Conflict, match="h:1"):
        await coordinator.register("gateway", "g", "h:2", ttl_s=600)


async def test_instance_id_taken_during_a_lease_loss_is_reported(
    coordinator: Coordinator, etcd: EtcdServer, cluster: str
) -> None:
    """A process whose lease ended does not overwrite the process with its id."""
    conflicts: asyncio.Queue[Conflict] = asyncio.Queue()
    first = await coordinator.register("gateway", "g", "h:1", on_conflict=conflicts.put_nowait)
    async with first._writing:  # It cannot enter again meanwhile.
        await etcd.end_leases(cluster, "g")
        await coordinator.register("gateway", "g", "h:2", ttl_s=600, owner=LIVE)
    await conflicts.get()
    (entry,) = await coordinator.discover("gateway").wait(timeout_s=60)
    assert entry.address == "h:2"
