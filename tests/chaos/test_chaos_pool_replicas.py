"""kill -9 of leaders and followers of a replicated pool under load, again and again.

FORGE_CRASH_ROUNDS sets how often (default 10).
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
from pathlib import Path

import pytest

from forge.core.placement.sharding import choose_shard
from forge.runtime.coordination import Coordinator
from forge.runtime.rpc.channel import Channels
from forge.runtime.rpc.remote import Remote
from forge.runtime.security.credentials import Security
from forge.runtime.security.tokens import Keyring
from forge.v1 import pool_pb2_grpc
from tests.support.pool.account import Ledger
from tests.support.pool.load import Writer
from tests.support.pool.shard import ReplicatedShard
from tests.support.runtime.etcd import EtcdServer

pytestmark = pytest.mark.timeout(1800)

ROUNDS = int(os.environ.get("FORGE_CRASH_ROUNDS", "10"))
SHARDS = ("s0", "s1", "s2")
WRITERS = 2
"""Of each shard."""
MORE = 15
"""Acknowledged by a shard between one kill and the next."""


async def test_three_replicated_shards_lose_no_acknowledged_write(
    tmp_path: Path, etcd: EtcdServer, cluster: str, coordinator: Coordinator
) -> None:
    """Each round kills the leader, the follower or both of one shard, at a random moment: the next
    leader has every acknowledged record whole, and the other shards are not affected."""
    key_file = tmp_path / "key"
    Keyring.generate(key_file)
    shards = {
        name: ReplicatedShard(
            tmp_path / name,
            etcd=etcd,
            coordinator=coordinator,
            cluster=cluster,
            shard=name,
            key_file=key_file,
        )
        for name in SHARDS
    }
    ledgers = {name: Ledger() for name in SHARDS}
    channels = Channels(Security(Keyring.from_file(key_file), subject="test"))
    pools = Remote(coordinator, channels, kind="pool", stub=pool_pb2_grpc.PoolServiceStub)
    draw = random.Random(0)
    for shard in shards.values():
        shard.start()
    try:
        async with asyncio.TaskGroup() as tasks:
            writers = [
                tasks.create_task(Writer(pools, name, ledgers[name]).fill(names_of(name)))
                for name in SHARDS
                for _ in range(WRITERS)
            ]
            keepers = [tasks.create_task(shard.keep_running()) for shard in shards.values()]
            for _ in range(ROUNDS):
                await strike(draw, shards, ledgers)
            for name, ledger in ledgers.items():
                await ledger.reach(ledger.count + MORE)
                await shards[name].audit(ledger)
                await Writer(pools, name, ledger).check_fence()
            for task in (*writers, *keepers):
                task.cancel()
    finally:
        for shard in shards.values():
            shard.stop()
        await channels.close()


_NUMBERS = itertools.count()


def names_of(shard: str):
    """Tasks that the scheduler would place on it."""
    return (name for number in _NUMBERS if choose_shard(name := f"t{number}", SHARDS) == shard)


async def strike(
    draw: random.Random, shards: dict[str, ReplicatedShard], ledgers: dict[str, Ledger]
) -> None:
    """One round."""
    name = draw.choice(SHARDS)
    shard, ledger = shards[name], ledgers[name]
    await ledger.reach(ledger.count + MORE)
    # A random moment of the load, for the kill.
    await asyncio.sleep(draw.random() * 0.05)
    match draw.choice(["leader", "leader", "follower", "both"]):
        case "leader":
            await shard.kill_leader()
        case "follower":
            leader, _ = await shard.leader()
            await shard.kill(*(one for one in shard.processes if one is not leader))
        case _:
            await shard.kill(*shard.processes)
            shard.start()
    await shard.audit(ledger)
    shard.start()
