"""One trainer trains a policy, and none begins again from the starting weights unasked."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from forge.runtime.coordination import Coordinator
from services.trainer.checkpoint.store import read_checkpoint
from services.trainer.leadership.lineage import RECORD_KEY, Lineage, LineageRecord
from tests.support.runtime.cut_connection import ADDRESS, CuttingProxy
from tests.support.runtime.etcd import EtcdServer
from tests.support.runtime.waiting import until
from tests.support.scheduler.cluster import SchedulerCluster, make_task
from tests.support.trainer.process import WEIGHTS_KEY, TrainerClient, TrainerProcess

pytestmark = [pytest.mark.faults, pytest.mark.timeout(900)]

needs_namespaces = pytest.mark.skipif(
    subprocess.run(
        ["unshare", "--user", "--map-root-user", "--uts", "--mount", "true"], capture_output=True
    ).returncode
    != 0,
    reason="unshare is not permitted here",
)
SETTINGS = {"checkpoint__every_steps": 1}


async def no_groups() -> int:
    return 0


class TwoHosts:
    """A scheduler, a pool, and two trainers with checkpoints of their own."""

    def __init__(
        self, folder: Path, services: SchedulerCluster, *, etcd: EtcdServer, cluster: str
    ) -> None:
        self.services = services
        self.client = TrainerClient(services.coordinator, services.channels)
        self.first, self.second = (
            TrainerProcess(
                self._folder(folder, name), etcd=etcd, cluster=cluster, key_file=folder / "key"
            )
            for name in ("first", "second")
        )
        shutil.rmtree(self.second.model_path)
        shutil.copytree(self.first.model_path, self.second.model_path)

    @staticmethod
    def _folder(folder: Path, name: str) -> Path:
        (folder / name).mkdir()
        return folder / name

    async def feed(self, first: int, count: int) -> None:
        """Submit and complete groups of two rollouts with different rewards."""
        tasks = [make_task(f"task-{n}", size=2) for n in range(first, first + count)]
        await self.services.submit(tasks)
        for _ in range(count):
            await self.services.complete(1, reward=1.0)
            await self.services.complete(1, reward=0.0)

    async def weight_version(self) -> int:
        """The newest version in etcd; 0 without one."""
        found = await self.services.coordinator.get(WEIGHTS_KEY)
        return 0 if found is None else int(json.loads(found.value)["weight_version"])

    async def trained_by_first(self, **settings: object) -> int:
        """Let the first trainer take a step and save it; return the version of its weights."""
        self.first.start(**SETTINGS, **settings)
        await self.feed(0, 2)
        await self.client.until_step(1)
        await until(lambda: self.first.logged("checkpoint_saved") or None)
        return await self.weight_version()


@pytest_asyncio.fixture
async def hosts(
    tmp_path: Path, etcd: EtcdServer, cluster: str, coordinator: Coordinator
) -> AsyncIterator[TwoHosts]:
    services = SchedulerCluster(tmp_path, etcd=etcd, cluster=cluster, coordinator=coordinator)
    services.start_pool()
    services.start_scheduler(queue={"batch_groups": "2"})
    made = TwoHosts(tmp_path, services, etcd=etcd, cluster=cluster)
    try:
        yield made
    finally:
        made.first.kill()
        made.second.kill()
        await services.close()


async def test_moved_trainer_without_its_checkpoint_refuses_to_start(hosts: TwoHosts) -> None:
    """It ends with one line: place of the checkpoint, and switch. With the switch the old lineage
    ends, and weight versions still rise."""
    version = await hosts.trained_by_first()
    hosts.first.kill()
    hosts.second.start(**SETTINGS)
    code, stderr = hosts.second.wait()
    assert code == 2 and stderr.count("\n") == 1
    assert str(hosts.first.checkpoints) in stderr and "--start-over=" in stderr
    assert f"`rsync -a {hosts.first.checkpoints}/ {hosts.second.checkpoints}`" in stderr
    assert await hosts.weight_version() == version

    lineage = stderr.partition("--start-over=")[2].split()[0].rstrip(":;,.")
    hosts.second.start(**SETTINGS, start_over=lineage)
    manifest = await hosts.client.until_version(version + 1)
    assert manifest.get("step", 0) == 0
    hosts.second.kill()
    # The trainer of the ended lineage is refused in turn.
    hosts.first.start(**SETTINGS)
    code, stderr = hosts.first.wait()
    assert code == 2 and str(hosts.second.checkpoints) in stderr


async def test_second_trainer_waits_and_takes_over(hosts: TwoHosts) -> None:
    """It publishes nothing while the first one lives; with the same checkpoints it then continues
    from the newest."""
    version = await hosts.trained_by_first()
    hosts.second.checkpoints.symlink_to(hosts.first.checkpoints)
    hosts.second.start(**SETTINGS)
    await until(lambda: hosts.second.logged("standby") or None)
    await hosts.feed(2, 2)
    assert (await hosts.client.until_step(2, after=1)).step == 2
    assert not hosts.first.logged("superseded")
    assert not hosts.second.logged("weights_published")
    assert hosts.first.terminate() == 0
    await until(lambda: hosts.second.logged("weights_published") or None)
    assert hosts.second.logged("rewound")[-1]["step"] == 2
    assert await hosts.weight_version() > version


async def test_standby_on_another_host_fetches_the_checkpoints(hosts: TwoHosts) -> None:
    """Each one, without a shared directory, and the last one before the leader ends: it continues
    at the same step. After a kill it continues from what it has fetched."""
    await hosts.trained_by_first()
    hosts.second.start(**SETTINGS)
    await until(lambda: hosts.second.logged("checkpoint_fetched") or None)
    assert hosts.second.logged("checkpoint_fetched")[-1]["step"] == 1
    await hosts.feed(2, 2)
    await hosts.client.until_step(2, after=1)
    assert hosts.first.terminate() == 0
    await until(lambda: hosts.second.logged("rewound") or None)
    assert hosts.second.logged("rewound")[-1]["step"] == 2
    copies = [path.name for path in sorted(hosts.second.checkpoints.glob("step-*"))]
    assert copies == ["step-00000001", "step-00000002"]

    hosts.first.start(**SETTINGS)
    await until(lambda: hosts.first.logged("standby") or None)
    await hosts.feed(4, 2)
    fetched = hosts.first.logged
    await until(lambda: [x["step"] for x in fetched("checkpoint_fetched")] == [3] or None)
    hosts.second.kill()
    await until(lambda: len(hosts.first.logged("rewound")) == 2 or None)
    assert hosts.first.logged("rewound")[-1]["step"] == 3


async def test_checkpoints_saved_at_once_leave_the_later_one_in_the_record(
    coordinator: Coordinator, tmp_path: Path
) -> None:
    """A drain can save while the checkpoint of a step is being announced. With the earlier one in
    the record a standby would never fetch the later."""
    lineage = Lineage(coordinator, trainer="t", location="h:/c", start_over="", ttl_s=30.0)
    await lineage.campaign(lambda: None)
    await lineage.begin(None, no_groups)
    steps = range(1, 6)
    for step in steps:
        (tmp_path / f"step-{step}").mkdir()
        (tmp_path / f"step-{step}" / "state.json").write_text(f'{{"step": {step}}}')
    for order in (steps, reversed(steps)):
        await asyncio.gather(
            *(lineage.saved(tmp_path / f"step-{n}", step=n, weight_version=n) for n in order)
        )
        record = await coordinator.get(RECORD_KEY)
        assert record is not None and LineageRecord.decode(record.value).step == 5
    await lineage.resign()


async def test_standby_with_copies_follows_a_refused_trainer(hosts: TwoHosts) -> None:
    """A trainer with an empty disk is elected first, since the standby is frozen: it ends with one
    line, and the standby continues. Started again, it fetches from the new leader."""
    await hosts.trained_by_first()
    hosts.second.start(**SETTINGS)
    await until(lambda: hosts.second.logged("checkpoint_fetched") or None)
    assert hosts.second.process is not None
    os.kill(hosts.second.process.pid, signal.SIGSTOP)
    hosts.first.kill()
    shutil.rmtree(hosts.first.checkpoints)
    hosts.first.start(**SETTINGS)
    code, stderr = hosts.first.wait()
    assert code == 2 and stderr.count("\n") == 1 and "has no checkpoint" in stderr
    os.kill(hosts.second.process.pid, signal.SIGCONT)
    await until(lambda: hosts.second.logged("rewound") or None)
    assert hosts.second.logged("rewound")[-1]["step"] == 1
    hosts.first.start(**SETTINGS)
    await until(lambda: hosts.first.logged("checkpoint_fetched") or None)


async def test_fetch_that_is_cut_continues_where_it_stopped(hosts: TwoHosts) -> None:
    """The connection of the standby breaks within the checkpoint: it is complete after the next
    attempt, which fetches only the rest."""
    network = CuttingProxy()
    await network.start()
    await hosts.trained_by_first(advertise_host=ADDRESS, port=network.port)
    (saved,) = hosts.first.checkpoints.glob("step-*")
    files = [path for path in saved.rglob("*") if path.is_file()]
    size_bytes = sum(path.stat().st_size for path in files)
    # The shards are the largest file, and the last one.
    cut_bytes = size_bytes * 9 // 10
    network.stall_next(after_bytes=cut_bytes)
    hosts.second.start(**SETTINGS)
    await until(lambda: network.stalled >= 0)
    await until(lambda: list(hosts.second.checkpoints.glob("fetched-*/published.json")) or None)
    network.cut()
    await until(lambda: hosts.second.logged("checkpoint_not_fetched") or None)
    await until(lambda: hosts.second.logged("checkpoint_fetched") or None)
    assert not list(hosts.second.checkpoints.glob("fetched-*"))
    copy = hosts.second.checkpoints / saved.name
    assert read_checkpoint(copy).fingerprint == read_checkpoint(saved).fingerprint
    for path in files:
        assert (copy / path.relative_to(saved)).read_bytes() == path.read_bytes()
    later = network.answered_bytes[network.stalled + 1 :]
    arrived = sum(path.stat().st_size for path in files if path.parent == saved)
    assert 0 < sum(later) < size_bytes - arrived // 2
    await network.close()


async def test_run_continues_from_the_copy_at_a_url(hosts: TwoHosts, tmp_path: Path) -> None:
    """On a host without any checkpoint, after the first one was lost without a standby."""
    url = {"checkpoint__copy_to": f"file://{tmp_path}/copies"}
    await hosts.trained_by_first(**url)
    await until(lambda: hosts.first.logged("checkpoint_copied") or None)
    hosts.first.kill()
    hosts.second.start(**SETTINGS, **url)
    await until(lambda: hosts.second.logged("rewound") or None)
    assert hosts.second.logged("rewound")[-1]["step"] == 1


async def test_copied_checkpoint_moves_the_run(hosts: TwoHosts) -> None:
    """The lineage continues on another host that has its newest checkpoint, and not with an older
    one, nor with another tokenizer."""
    for trainer in (hosts.first, hosts.second):
        (trainer.model_path / "tokenizer.json").write_text("{}")
    await hosts.trained_by_first()
    shutil.copytree(hosts.first.checkpoints, hosts.second.checkpoints)
    await hosts.feed(2, 2)
    await hosts.client.until_step(2, after=1)
    assert hosts.first.terminate() == 0
    hosts.second.start(**SETTINGS)
    code, stderr = hosts.second.wait()
    assert code == 2 and "step 2" in stderr and str(hosts.first.checkpoints) in stderr

    shutil.rmtree(hosts.second.checkpoints)
    shutil.copytree(hosts.first.checkpoints, hosts.second.checkpoints)
    (hosts.second.model_path / "tokenizer.json").write_text('{"other": 1}')
    hosts.second.start(**SETTINGS)
    code, stderr = hosts.second.wait()
    assert code == 2 and stderr.count("\n") == 1
    assert "trains tokenizer.json" in stderr and "--start-over=" in stderr

    (hosts.second.model_path / "tokenizer.json").write_text("{}")
    hosts.second.start(**SETTINGS)
    await until(lambda: hosts.second.logged("rewound") or None)
    assert hosts.second.logged("rewound")[-1]["step"] == 2


async def test_other_checkpoint_of_the_same_step_is_refused(hosts: TwoHosts) -> None:
    """A step may be repeated after a rewind: the record has the fingerprint of its checkpoint."""
    await hosts.trained_by_first()
    hosts.first.kill()
    shutil.copytree(hosts.first.checkpoints, hosts.second.checkpoints, symlinks=True)
    (state,) = hosts.second.checkpoints.glob("step-*/state.json")
    state.write_text(state.read_text() + "\n")
    hosts.second.start(**SETTINGS)
    code, stderr = hosts.second.wait()
    assert code == 2 and "another checkpoint of step 1" in stderr


async def test_late_checkpoint_of_a_former_trainer_is_set_aside(hosts: TwoHosts) -> None:
    """The first trainer loses its lease, and finishes the checkpoint of step 2 in the shared
    directory after the second one has continued from step 1."""
    await hosts.trained_by_first()
    hosts.first.kill()
    hosts.second.checkpoints.symlink_to(hosts.first.checkpoints)
    hosts.second.start(**SETTINGS)
    await until(lambda: hosts.second.logged("rewound") or None)
    hosts.second.kill()
    late = hosts.first.checkpoints / "step-00000002"
    shutil.copytree(hosts.first.checkpoints / "step-00000001", late)
    state = json.loads((late / "state.json").read_text())
    (late / "state.json").write_text(json.dumps(state | {"step": 2}))
    hosts.second.start(**SETTINGS)
    await until(lambda: len(hosts.second.logged("rewound")) == 2 or None)
    assert hosts.second.logged("rewound")[-1]["step"] == 1
    assert not late.exists()


@needs_namespaces
async def test_shared_directory_moves_the_run_to_another_host(hosts: TwoHosts) -> None:
    """Two hosts mount one directory at different paths: the second trainer continues from the first
    one's checkpoint, and the record names the second host."""
    version = await hosts.trained_by_first()
    hosts.first.kill()
    hosts.second.start_on("second-host", hosts.first.checkpoints, **SETTINGS)
    await until(lambda: hosts.second.logged("rewound") or None)
    assert hosts.second.logged("rewound")[-1]["step"] == 1
    assert (await hosts.client.until_version(version + 1))["step"] == 1
    await hosts.feed(2, 2)
    await until(lambda: (hosts.first.checkpoints / "step-00000002").exists())
    assert hosts.second.terminate() == 0

    # Back without the mount, the refusal names the host to copy from.
    (hosts.first.checkpoints / "step-00000002").rename(hosts.first.checkpoints / "lost")
    hosts.first.start(**SETTINGS)
    code, stderr = hosts.first.wait()
    place = f"second-host:{hosts.second.checkpoints}"
    assert code == 2 and "only the checkpoint of step 1" in stderr
    assert f"`rsync -a {place}/ {hosts.first.checkpoints}`" in stderr
