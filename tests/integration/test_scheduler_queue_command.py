"""`forge queue` as an operator has it: the command, a real scheduler, and a leader that dies."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from pathlib import Path

import pytest

from forge.cli.command_exit import INTERRUPTED
from forge.runtime.security.tokens import Keyring
from forge.v1 import scheduler_pb2
from tests.support.runtime.command import run_command
from tests.support.runtime.etcd import EtcdServer
from tests.support.runtime.waiting import until
from tests.support.scheduler.cluster import SchedulerCluster, ids_of, make_task

pytestmark = pytest.mark.commands

FEED = Path(__file__).parents[2] / "deploy" / "systemd" / "forge-feed@.service"


class Operator:
    """Somebody at a shell."""

    def __init__(self, etcd: EtcdServer, cluster: str, key_file: Path) -> None:
        self._system = ["--etcd", etcd.endpoint, "--cluster", cluster, "--key-file", str(key_file)]

    async def start(self, *words: str) -> Process:
        argv = [sys.executable, "-m", "forge.cli.main", "queue", *words, *self._system]
        return await asyncio.create_subprocess_exec(*argv, stdin=DEVNULL, stdout=PIPE, stderr=PIPE)

    async def types(self, *words: str) -> str:
        """What the command answers."""
        ended = await run_command("queue", *words, *self._system)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout


async def answer(command: Process) -> str:
    said, _ = await command.communicate()
    assert command.returncode == 0
    return said.decode()


async def line_with(command: Process, text: str) -> str:
    """The next line of the command's output that has the text."""
    assert command.stdout is not None
    async for line in command.stdout:
        if text in line.decode():
            return line.decode()
    raise AssertionError(f"the command ended without {text!r}")


def write_tasks(file: Path, *group_sizes: int) -> str:
    """A file of tasks with these group sizes."""
    lines = [
        json.dumps({"payload": {"n": n}, "group_size": size}) + "\n"
        for n, size in enumerate(group_sizes)
    ]
    file.write_text("".join(lines))
    return str(file)


async def test_submission_waits_for_an_absent_scheduler(
    forge: SchedulerCluster, etcd: EtcdServer, cluster: str, tmp_path: Path
) -> None:
    """Before the first one and after a kill; then it continues. A repetition adds nothing and shows
    the states of the earlier tasks, with the reasons of tombstones."""
    operator = Operator(etcd, cluster, tmp_path / "key")
    file = write_tasks(tmp_path / "sums.jsonl", 1, 1, 1, 1)
    words = ("submit", file, "--domain", "math", "--queued", "2", "--no-shuffle")
    submits = await operator.start(*words)
    await line_with(
        submits, "scheduler or pool shard unreachable, waiting: 0 of 1 fitting scheduler instances"
    )
    leader = forge.start_scheduler()
    first = await forge.leader()
    await line_with(submits, "reachable again")
    await line_with(submits, "sums, epoch 0: 2 of 4 tasks submitted")
    await forge.kill(leader)
    await line_with(submits, "scheduler or pool shard unreachable, waiting: ")
    forge.start_scheduler()
    await forge.leader(other_than=first.instance_id)
    await forge.complete(2)
    summary = (await answer(submits)).splitlines()[-1]
    assert summary == (
        "sums: 4 new, 0 already queued, 0 already in flight, 0 already done, 0 refused"
    )

    await forge.commit(await forge.take(), 1)
    await operator.types("drop", "sums.e0.r2", "--reason", "not wanted", "--yes")
    assert len(await forge.lease(1)) == 1
    repeated = (await operator.types(*words)).splitlines()
    assert repeated[0] == (
        "sums: 4 tasks were submitted before: 2 trained, 1 tombstoned, 1 running"
    )
    assert repeated[-2:] == [
        "sums: 0 new, 0 already queued, 1 already in flight, 3 already done (2 trained, 1 "
        "tombstoned), 0 refused",
        "1 tombstoned: not wanted (task sums.e0.r2)",
    ]


async def test_submission_of_refused_tasks_submits_the_others(
    forge: SchedulerCluster, etcd: EtcdServer, cluster: str, tmp_path: Path
) -> None:
    """The summary has the reason of each refusal, and the exit code is that of a mistake."""
    operator = Operator(etcd, cluster, tmp_path / "key")
    forge.start_scheduler(max_group_size="2")
    file = write_tasks(tmp_path / "sums.jsonl", 1, 3, 1)
    submits = await operator.start("submit", file, "--domain", "math")
    said, wrong = await submits.communicate()
    assert submits.returncode == 2
    assert "1 tasks were refused" in wrong.decode()
    summary, refused = said.decode().splitlines()[-2:]
    assert summary.startswith("sums: 2 new, ") and summary.endswith(", 1 refused")
    assert refused.startswith("refused: ") and "sums.e0.r1" in refused
    assert {group.group.task.task_id for group in await forge.groups("sums")} == {
        "sums.e0.r0",
        "sums.e0.r2",
    }


async def test_feed_unit_keeps_the_queue_filled(
    forge: SchedulerCluster, etcd: EtcdServer, cluster: str, tmp_path: Path
) -> None:
    """Its command, with an operator's token and systemd's socket: ready without a scheduler, beats,
    endless epochs up to the depth, an orderly end by SIGTERM, and the same place afterwards."""
    at = ["--etcd", etcd.endpoint, "--cluster", cluster, "--key-file", str(tmp_path / "key")]
    issue = ("token", "issue", "operator", *at, "--subject", "feed")
    assert (await run_command(*issue, "--out", str(tmp_path / "token"))).returncode == 0
    write_tasks(tmp_path / "sums.jsonl", 1, 1)
    (start,) = re.findall(r"^ExecStart=\S+/forge (.+)$", FEED.read_text(), re.M)
    start = start.replace("/var/lib/forge/feed/%i", str(tmp_path / "sums"))
    words = start.replace("%d", str(tmp_path)).replace("$FORGE_FEED", "--domain math --queued 5")
    systemd = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    systemd.bind(str(tmp_path / "notify"))
    said = set[bytes]()
    asyncio.get_running_loop().add_reader(
        systemd, lambda: said.add(systemd.recv(1000).split(b":")[0])
    )
    environ = os.environ | {
        "FORGE_ETCD": etcd.endpoint,
        "FORGE_CLUSTER": cluster,
        "NOTIFY_SOCKET": str(tmp_path / "notify"),
        "WATCHDOG_USEC": "300000",
    }

    async def fed() -> Process:
        argv = [sys.executable, "-m", "forge.cli.main", *words.split()]
        return await asyncio.create_subprocess_exec(*argv, stdout=PIPE, env=environ)

    async def queued(groups: int) -> None:
        async def are_queued() -> bool:
            return (await forge.status()).queued == groups

        await until(are_queued)

    feed = await fed()
    await line_with(feed, "scheduler or pool shard unreachable, waiting")
    await until(
        lambda: (
            said
            == {b"READY=1", b"WATCHDOG=1", b"STATUS=scheduler or pool shard unreachable, waiting"}
        )
    )
    forge.start_scheduler()
    await queued(5)
    await forge.complete(1)
    await queued(5)
    feed.send_signal(signal.SIGTERM)
    summary, _ = await feed.communicate()
    assert feed.returncode == INTERRUPTED
    # SIGTERM may come before the answer of the last call.
    assert re.search(r"^sums: [56] new, 0 already queued", summary.decode(), re.M)
    feed = await fed()
    await line_with(feed, "sums: 6 tasks were submitted before: 5 queued, 1 complete")
    await forge.complete(1)
    await queued(5)
    feed.send_signal(signal.SIGTERM)
    assert await feed.wait() == INTERRUPTED
    ids = [group.group.task.task_id for group in await forge.groups("sums")]
    assert sorted(ids)[:6] == [f"sums.e{n // 2}.r{n % 2}" for n in range(6)]
    assert len(ids) == 7 and max(ids).startswith("sums.e3.")
    asyncio.get_running_loop().remove_reader(systemd)
    systemd.close()


async def test_submission_ends_after_its_timeout(
    etcd: EtcdServer, cluster: str, tmp_path: Path
) -> None:
    """As a failure that a repetition may correct."""
    Keyring.generate(tmp_path / "key")
    operator = Operator(etcd, cluster, tmp_path / "key")
    file = write_tasks(tmp_path / "sums.jsonl", 1)
    submits = await operator.start("submit", file, "--domain", "math", "--timeout", "1s")
    said, wrong = await submits.communicate()
    assert submits.returncode == 1
    assert b"scheduler or pool shard unreachable, waiting" in said and b"0 of 1 fitting" in wrong


async def test_queue_is_paused_resumed_and_drained_by_commands(
    forge: SchedulerCluster, etcd: EtcdServer, cluster: str, tmp_path: Path
) -> None:
    """Each takes effect at once, a drain also across SIGKILL of the leader; `--wait` returns when
    the rollouts of the first leader have ended under the second."""
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


async def test_tasks_without_an_able_runner_are_dropped_by_command(
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

    assert "no runner declares: domain web, scaffold blackbox" in await operator.types("status")
    declined = await operator.start("drop", "--domain", "web")
    said, _ = await declined.communicate()
    assert declined.returncode == 1
    assert said.decode().startswith("Pending groups of domain web are never trained then.")
    with_domain = ("drop", "--domain", "web", "--reason", "no runner has its code", "--yes")
    assert await operator.types(*with_domain) == "2 groups dropped\n"
    assert await operator.types(*with_domain) == "0 groups dropped\n"
    assert ids_of(await forge.take(groups=1)) == ["batched"]
    assert await operator.types("drop", "batched", "running", "--yes") == "1 groups dropped\n"
    assert await forge.renew(leases[1:]) == [leases[1].lease_id]
    for words in (["drop", "unknown", "--yes"], ["drop", "--yes"]):
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
        "running": "dropped by an operator",
        "next": "",
    }
    status = await forge.status()
    assert (status.tombstoned, status.pending) == (3, 2)
    assert (await operator.types("status")).splitlines()[1:] == [
        "2 tombstoned: no runner has its code (task web-2)",
        "1 tombstoned: dropped by an operator (task running)",
    ]
    shown = json.loads(await operator.types("status", "--json"))
    assert (shown["tombstoned"], shown["pending"], shown["trained"]) == (3, 2, 0)
    assert shown["tombstones"] == [
        {"reason": "no runner has its code", "groups": 2, "task_id": "web-2"},
        {"reason": "dropped by an operator", "groups": 1, "task_id": "running"},
    ]
