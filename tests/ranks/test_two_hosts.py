"""One trainer on two hosts, with a scheduler and a pool: docs/scaling.md, start on several hosts.

A host is a host name that resolves to a loopback address of its own; the ranks meet at that of the
first one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from tests.support.runtime.waiting import until
from tests.support.scheduler.cluster import assert_counts_balance
from tests.support.trainer.hosts import ADDRESSES, Hosts
from tests.support.trainer.process import START_S
from tests.support.trainer.stack import GROUPS_PER_STEP, Stack, until_finished

pytestmark = pytest.mark.timeout(1200)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A scheduler, a pool and two hosts for one trainer."""

    stack: Stack
    hosts: Hosts


@pytest_asyncio.fixture
async def cluster_of_two(stack: Stack, tmp_path: Path) -> AsyncIterator[Cluster]:
    settings = stack.trainer.flags(
        mesh__dp_shard=2, max_steps=5, checkpoint__every_steps=2, drain_s=60, seed=3
    )
    hosts = Hosts(tmp_path, settings)
    try:
        yield Cluster(stack=stack, hosts=hosts)
    finally:
        await hosts.stop()
        for host in range(2):
            print(f"--- host {host}\n{hosts.said(host)}")  # pytest shows it beside a failure


@pytest.mark.parametrize("lost", ["first rank", "rank", "host", "network"])
async def test_loss_of_one_of_two_hosts_restarts_both_from_the_checkpoint(
    cluster_of_two: Cluster, lost: str
) -> None:
    """kill -9 of a rank; or of the other host's torchrun, with which the rank dies, while the first
    host waits for a batch; or a host that answers no more and closes no connection. Batches after
    the checkpoint are visible again, and each group counts once."""
    stack, hosts = cluster_of_two.stack, cluster_of_two.hosts
    await hosts.start(1)
    await hosts.start(0)
    await stack.train_past_checkpoint(limit_s=START_S)
    first, other, agent = hosts.rank(0), hosts.rank(1), hosts.agent(1)
    assert first is not None and other is not None
    assert ADDRESSES[0] in listens_on(first)
    assert listens_on(other) == {ADDRESSES[1]}
    killed = {"first rank": first, "rank": other, "host": agent}
    if lost == "network":
        other.suspend()
    else:
        killed[lost].kill()
    if lost != "host":  # else the first host has nothing to exchange, and must notice nevertheless
        await stack.feed(3 * GROUPS_PER_STEP, 2 * GROUPS_PER_STEP)
    _, left = await asyncio.to_thread(psutil.wait_procs, [first], START_S)
    assert not left
    if lost == "network":
        agent.kill()
    _, left = await asyncio.to_thread(psutil.wait_procs, [other], START_S)
    assert not left
    if lost == "first rank":  # the ranks of the other host end without an error
        await until(lambda: hosts.ended(1), limit_s=START_S)
        await hosts.start(1)
    if lost == "host":
        await stack.feed(3 * GROUPS_PER_STEP, 2 * GROUPS_PER_STEP)

    status = await until_finished(stack.client)
    assert status.step == 5
    assert sorted((await stack.trained()).values()) == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert stack.trainer.logged("rewound")[-1]["step"] == 2
    assert stack.trainer.recorded_steps() == [1, 2, 3, 4, 5]
    assert_counts_balance(await stack.cluster.status())
    said, other_said = hosts.crashes(0)[0], "".join(hosts.crashes(1)[:1])
    if lost == "rank":
        assert other_said == "forge trainer: rank 1 was killed by SIGKILL"
        assert said.startswith("forge trainer: rank 0 failed: ")
    elif lost == "first rank":
        assert (said, other_said) == ("forge trainer: rank 0 was killed by SIGKILL", "")
    else:
        assert said == "forge trainer: rank 0 failed: rank 1 sent no heartbeat for 60 s"


async def test_ranks_that_do_not_meet_start_again_and_meet_late_ones(
    cluster_of_two: Cluster,
) -> None:
    """The first host ends at its limit, with the missing rank in its line. That rank, which was
    started for the earlier round, then joins the next one."""
    stack, hosts = cluster_of_two.stack, cluster_of_two.hosts
    await hosts.start(1)
    await hosts.start(0, "--mesh.join-s=10")
    late = await until(lambda: hosts.rank(1), limit_s=START_S)
    late.suspend()  # before it connects
    await until(lambda: hosts.crashes(0) and hosts.running(0), limit_s=START_S)
    late.resume()
    await stack.feed(0, 5 * GROUPS_PER_STEP)

    assert (await until_finished(stack.client)).step == 5
    line = "forge trainer: rank 0 failed: the ranks did not meet within 10 s: missing: rank 1"
    assert hosts.crashes(0)[0] == line


def listens_on(process: psutil.Process) -> set[str]:
    """Addresses on which other processes can connect to this one."""
    found = process.net_connections("tcp")
    return {one.laddr.ip for one in found if one.status == psutil.CONN_LISTEN}


async def test_stop_of_the_first_host_saves_the_last_step_and_ends_both(
    cluster_of_two: Cluster,
) -> None:
    """The ranks of the other host end with rank 0, and its torchrun with them, without an error."""
    stack, hosts = cluster_of_two.stack, cluster_of_two.hosts
    await hosts.start(1)
    await hosts.start(0)
    await stack.feed(0, GROUPS_PER_STEP)
    await stack.client.until_step(1)
    hosts.agent(0).terminate()

    await until(lambda: hosts.ended(0) and hosts.ended(1), limit_s=START_S)
    assert (stack.trainer.checkpoints / "step-00000001" / "state.json").is_file()
    assert "Traceback" not in hosts.said(0) + hosts.said(1)
