"""`forge queue` as an operator has it: the command, a real scheduler, and a leader that dies."""

from __future__ import annotations

import asyncio
import signal
import sys
from asyncio.subprocess import PIPE, Process
from pathlib import Path

from forge.v1 import scheduler_pb2
from tests.support.runtime.etcd import EtcdServer
from tests.support.runtime.waiting import until
from tests.support.scheduler.cluster import SchedulerCluster, ids_of, make_task


class Operator:
    """Somebody at a shell."""

    def __init__(self, etcd: EtcdServer, cluster: str, key_file: Path) -> None:
        self._system = ["--etcd", etcd.endpoint, "--cluster", cluster, "--key-file", str(key_file)]

    async def start(self, *words: str) -> Process:
        argv = [sys.executable, "-m", "forge.cli.main", "queue", *words, *self._system]
        return await asyncio.create_subprocess_exec(*argv, stdout=PIPE)

    async def types(self, *words: str) -> str:
        """What the command answers."""
        return await answer(await self.start(*words))


async def answer(command: Process) -> str:
    said, _ = await command.communicate()
    assert command.returncode == 0
    return said.decode()


async def test_queue_is_paused_resumed_and_drained_by_hand(
    forge: SchedulerCluster, etcd: EtcdServer, cluster: str, tmp_path: Path
) -> None:
    """Each holds at once, a drain across SIGKILL of the leader too; and `--wait` returns when what
    ran under the first leader has ended under the second."""
    operator = Operator(etcd, cluster, tmp_path / "key")
    leader = forge.start_scheduler(queue={"rollout_lease_s": "600"})
    first = await forge.leader()
    forge.start_scheduler(queue={"rollout_lease_s": "600"})
    await forge.submit([make_task(name) for name in "abc"])
    assert (await operator.types("pause")).startswith("paused; windowed: H 0, W 4")
    assert await forge.lease(1, wait_s=0.0) == []
    assert (await operator.types("resume")).startswith("running; ")
    running = await forge.lease(1)
    draining = await operator.start("drain", "--wait")

    async def drains() -> bool:
        return (await forge.status()).activity == scheduler_pb2.ACTIVITY_DRAINING

    await until(drains)
    assert await forge.lease(1, wait_s=0.0) == []

    # Whoever looked between the end of the hold and a late renewal would see nothing run.
    draining.send_signal(signal.SIGSTOP)
    try:
        await forge.kill(leader)
        await forge.leader(other_than=first.instance_id)
        assert await forge.renew(running) == []
    finally:
        draining.send_signal(signal.SIGCONT)

    async def taken_over() -> bool:
        return not (await forge.status()).taking_over

    await until(taken_over)
    assert await forge.lease(1, wait_s=0.0) == []
    assert (await operator.types("status")).startswith("draining; ")
    assert draining.returncode is None
    await forge.seal(running[0])
    await forge.finish(running)
    assert "0 of 8 groups run, 2 queued, 1 complete" in await answer(draining)
    assert ids_of(await forge.take()) == ["a"]
    await operator.types("resume")
    assert [lease.task.task_id for lease in await forge.lease(2)] == ["b", "c"]


async def test_tasks_that_no_runner_can_do_are_dropped_by_hand(
    forge: SchedulerCluster, etcd: EtcdServer, cluster: str, tmp_path: Path
) -> None:
    """They hold the head of the window until an operator drops them: queued, running or complete.
    The pool has the reason, a repetition drops nothing, and a group in a batch stays."""
    operator = Operator(etcd, cluster, tmp_path / "key")
    leader = forge.start_scheduler(queue={"window": "2"})
    await forge.submit(
        [
            make_task("web-1", domain="web"),
            make_task("web-2", domain="web"),
            make_task("batched"),
            make_task("running"),
            make_task("next"),
        ]
    )
    leases = await forge.lease(2, domains=["code"])
    assert [lease.task.task_id for lease in leases] == ["batched", "running"]
    for lease in leases[:1]:
        await forge.seal(lease)
    await forge.finish(leases[:1])
    assert (await forge.take(wait_s=0.0)).batch_id == "", "the head is a task without a runner"

    with_domain = ("drop", "--domain", "web", "--reason", "no runner has its code")
    assert await operator.types(*with_domain) == "2 groups dropped\n"
    assert await operator.types(*with_domain) == "0 groups dropped\n"
    assert ids_of(await forge.take(groups=1)) == ["batched"]
    assert await operator.types("drop", "batched", "running", "--reason", "not wanted") == (
        "1 groups dropped\n"
    )
    assert await forge.renew(leases[1:]) == [leases[1].lease_id]
    for words in (["drop", "unknown", "--reason", "x"], ["drop", "--reason", "x"]):
        refused = await operator.start(*words)
        await refused.communicate()
        assert refused.returncode == 2

    await forge.kill(leader)
    forge.start_scheduler(queue={"window": "2"})
    reasons = {one.group.task.task_id: one.group.reason for one in await forge.groups()}
    assert reasons == {
        "web-1": "no runner has its code",
        "web-2": "no runner has its code",
        "batched": "",
        "running": "not wanted",
        "next": "",
    }
    status = await forge.status()
    assert (status.tombstoned, status.pending) == (3, 2)
