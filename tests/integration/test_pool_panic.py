"""A pool process whose LMDB environment panics."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from pathlib import Path

import pytest

from forge.core.errors import ForgeError, ResourceExhausted, Unavailable
from forge.runtime.coordination import Coordinator
from forge.runtime.rpc.status import translated
from tests.support.pool.process import PoolClient, PoolProcess
from tests.support.pool.records import make_turn
from tests.support.runtime.etcd import EtcdServer
from tests.support.runtime.log_lines import log_lines

pytestmark = pytest.mark.faults


async def test_panic_ends_the_process_and_loses_no_acknowledged_write(
    tmp_path: Path, etcd: EtcdServer, cluster: str, coordinator: Coordinator
) -> None:
    """The first MDB_PANIC ends the process with exit code 1; no sender gets INTERNAL, and the next
    process has every acknowledged write."""
    pool = PoolProcess(tmp_path, etcd=etcd, cluster=cluster, module="tests.support.pool.lmdb_panic")
    pool.start()
    try:
        client = await PoolClient.connect(pool, coordinator)
        await client.append([make_turn("t:0:0")])
        os.kill(pool.pid, signal.SIGUSR1)
        refusals = await refusals_until_it_ends(pool, client)
        assert pool.wait()[0] == 1
        assert refusals <= {ResourceExhausted, Unavailable}
        (failure,) = [
            line for line in log_lines(pool.log_path) if line["event"] == "service_part_failed"
        ]
        assert "MDB_PANIC" in failure["error"]
        await client.close()

        pool.start()
        client = await PoolClient.connect(pool, coordinator)
        (kept,) = await client.fetch("t:0:0")
        assert kept.turns == [make_turn("t:0:0")]
        await client.close()
    finally:
        pool.kill()


async def refusals_until_it_ends(pool: PoolProcess, client: PoolClient) -> set[type[ForgeError]]:
    """Kinds of errors that seals of empty trajectories met."""
    found: set[type[ForgeError]] = set()
    for index in itertools.count(1):
        if pool.ended:
            break
        try:
            async with translated():
                await client.seal(f"t:{index}:0", 0)
        except ForgeError as error:
            found.add(type(error))
        # A pace: some seals in each commit, none is waited for.
        await asyncio.sleep(0.02)
    return found
