"""Two pool processes that claim one shard, or one instance id: exactly one of them serves."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from forge.runtime.coordination import Coordinator
from services.pool.maintenance.backup.backup import backup
from services.pool.maintenance.backup.restore import restore
from tests.support.pool.process import PoolClient, PoolProcess
from tests.support.pool.records import make_turn
from tests.support.runtime.etcd import EtcdServer

pytestmark = pytest.mark.faults

MakePool = Callable[[str], PoolProcess]


@pytest.fixture
def make_pool(tmp_path: Path, etcd: EtcdServer, cluster: str) -> Iterator[MakePool]:
    """Makes processes of shard s0, each with a directory of the name given."""
    made: list[PoolProcess] = []

    def make(name: str) -> PoolProcess:
        pool = PoolProcess(tmp_path / name, etcd=etcd, cluster=cluster, shard="s0")
        made.append(pool)
        return pool

    yield make
    for pool in made:
        pool.kill()


async def turns_kept(pool: PoolProcess, coordinator: Coordinator, trajectory_id: str) -> int:
    client = await PoolClient.connect(pool, coordinator)
    (trajectory,) = await client.fetch(trajectory_id)
    await client.close()
    return len(trajectory.turns)


async def serve_one_turn(pool: PoolProcess, coordinator: Coordinator) -> None:
    pool.start()
    client = await PoolClient.connect(pool, coordinator)
    await client.append([make_turn("t:0:0")])
    await client.close()


def refusal(pool: PoolProcess) -> str:
    """The one line by which a process refuses to start."""
    code, stderr = pool.wait()
    (line,) = stderr.splitlines()
    assert code == 2, line
    return line


async def test_second_store_of_a_shard_refuses_to_start(
    make_pool: MakePool, coordinator: Coordinator
) -> None:
    """The refusal names the shard, both directories and the way out; the first store serves on,
    also after its absence while the second one tried."""
    first, second = make_pool("first"), make_pool("second")
    await serve_one_turn(first, coordinator)
    second.start()
    said = refusal(second)
    assert "shard s0" in said
    assert str(first.data_dir) in said
    assert str(second.data_dir) in said
    assert "forge pool adopt" in said
    assert await turns_kept(first, coordinator, "t:0:0") == 1

    first.kill()
    second.start()
    refusal(second)
    first.start()
    assert await turns_kept(first, coordinator, "t:0:0") == 1


async def test_second_process_of_an_instance_id_refuses_to_start(
    make_pool: MakePool, coordinator: Coordinator, tmp_path: Path, etcd: EtcdServer, cluster: str
) -> None:
    """Discovery keeps the entry of the first; the second ends with one line."""
    first = make_pool("first")
    first.start("--instance-id", "pool-0")
    await coordinator.discover("pool").wait(timeout_s=120)
    (entry,) = coordinator.discover("pool").instances
    other = PoolProcess(tmp_path / "other", etcd=etcd, cluster=cluster, shard="s1")
    try:
        other.start("--instance-id", "pool-0")
        assert "pool-0" in refusal(other)
        assert coordinator.discover("pool").instances == (entry,)
    finally:
        other.kill()


async def test_restored_shard_takes_the_name_after_the_end_of_the_old_one(
    make_pool: MakePool, coordinator: Coordinator, tmp_path: Path
) -> None:
    """A restored directory is refused while the old store is served, then takes its place; the old
    store is refused from then on."""
    old, new = make_pool("old"), make_pool("new")
    await serve_one_turn(old, coordinator)
    backup(old.data_dir, tmp_path / "copy", lambda done, of: None)
    restore(tmp_path / "copy", new.data_dir, lambda done, of: None)
    new.start()
    assert str(old.data_dir) in refusal(new)

    old.kill()
    new.start()
    assert await turns_kept(new, coordinator, "t:0:0") == 1
    new.kill()
    old.start()
    assert "forge pool adopt" in refusal(old)


async def test_clone_of_a_directory_refuses_to_start(
    make_pool: MakePool, coordinator: Coordinator
) -> None:
    """A copy with all files is the same store by its identity: only one of them serves."""
    first, clone = make_pool("first"), make_pool("clone")
    await serve_one_turn(first, coordinator)
    shutil.copytree(first.data_dir, clone.data_dir)
    clone.start()
    assert "shard s0" in refusal(clone)
    assert await turns_kept(first, coordinator, "t:0:0") == 1
