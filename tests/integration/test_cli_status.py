"""`forge status` and `forge top` of a system with missing services."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import termios
from importlib.metadata import version
from pathlib import Path

import pytest

from forge.core.extras import DISTRIBUTION
from forge.runtime.coordination import Coordinator
from forge.runtime.security.credentials import Security
from forge.runtime.security.tokens import Keyring
from forge.runtime.weights import TRAINER_STANDBYS
from services.trainer.leadership.lineage import Lineage
from tests.support.runtime.command import run_command
from tests.support.runtime.etcd import EtcdServer
from tests.support.runtime.waiting import until
from tests.support.scheduler.cluster import START_S, SchedulerCluster, make_task

pytestmark = pytest.mark.commands

ADDRESS = "a-host-with-a-long-name.in.some.rack.example:65535"


async def show(
    etcd: EtcdServer, cluster: str, key: Path, *words: str
) -> subprocess.CompletedProcess[str]:
    """What `forge status` prints."""
    system = ("--etcd", etcd.endpoint, "--cluster", cluster, "--key-file", str(key))
    return await run_command("status", *system, *words)


async def test_status_reports_missing_services_without_waiting(
    etcd: EtcdServer, cluster: str, coordinator: Coordinator, tmp_path: Path
) -> None:
    """Standard output has the answer alone: the present services, to the last character, those of
    serving groups too, and the missing ones."""
    key = tmp_path / "key"
    Keyring.generate(key)
    key_holder = await Coordinator.connect(
        etcd.endpoint, cluster=cluster, signatures=Security(Keyring.from_file(key))
    )
    await key_holder.register("pool", "pool-1", ADDRESS, metadata={}, ttl_s=30.0)
    await key_holder.register("router@old", "router-old", "127.0.0.1:9", metadata={}, ttl_s=30.0)
    ended = await show(etcd, cluster, key)
    await key_holder.close()
    assert (ended.returncode, ended.stderr) == (0, "")
    cells = [[cell.strip() for cell in line.split("│")] for line in ended.stdout.splitlines()]
    rows = [row for row in cells if len(row) > 3]
    # One line each: an id that is broken cannot be copied.
    assert [row[3] for row in rows if row[3]] == [ADDRESS, "127.0.0.1:9"]
    assert [row[1] for row in rows if row[2] == "none"] == [
        *("scheduler", "trainer", "prefill", "decode", "router", "gateway", "runner")
    ]
    for kind in ("scheduler", "router", "trainer"):
        missing = f"0 of 1 fitting {kind} instances in cluster '{cluster}' after 0 s"
        assert missing in " ".join(ended.stdout.split())
    assert "rpc_retried" not in ended.stdout
    assert "No trainer is registered: complete groups wait. Start one; " in ended.stdout
    assert f"pool pool-1 at {ADDRESS}: " in ended.stdout


async def test_services_of_a_release_without_signatures_are_shown_on_request(
    etcd: EtcdServer, cluster: str, coordinator: Coordinator, tmp_path: Path
) -> None:
    """Otherwise the command names the setting that accepts them."""
    key = tmp_path / "key"
    Keyring.generate(key)
    await coordinator.register("pool", "pool-1", "127.0.0.1:9", metadata={}, ttl_s=30.0)
    refused = await show(etcd, cluster, key)
    assert refused.returncode == 2 and "accept_unsigned" in refused.stderr
    shown = json.loads((await show(etcd, cluster, key, "--json", "--accept-unsigned")).stdout)
    assert [one["instance"] for one in shown["services"]] == ["pool-1"]


async def test_status_shows_leaders_and_standbys(
    forge: SchedulerCluster, etcd: EtcdServer, cluster: str, tmp_path: Path
) -> None:
    """A standby trainer serves no call and is shown until it leads or ends. The lines and the JSON
    have the same facts."""
    for _ in range(2):
        forge.start_scheduler()
    leader = await forge.leader()
    schedulers = forge.coordinator.discover("scheduler")
    both = await schedulers.wait(count=2, timeout_s=START_S)
    (standby,) = (one for one in both if one.instance_id != leader.instance_id)
    await forge.submit([make_task("a"), make_task("b")])
    first, second = (
        Lineage(
            forge.coordinator,
            trainer=f"{name} of-{name}",
            location=f"host-of-{name}:/checkpoints",
            start_over="",
            ttl_s=5.0,
        )
        for name in ("trainer-1", "trainer-2")
    )
    await first.campaign(lambda: None)
    campaign = asyncio.create_task(second.campaign(lambda: None))

    async def stands_by() -> bool:
        return bool(await forge.coordinator.values(TRAINER_STANDBYS))

    await until(stands_by)
    key = tmp_path / "key"
    shown = json.loads((await show(etcd, cluster, key, "--json")).stdout)
    services = {one["instance"]: one for one in shown["services"]}
    roles = {instance: (one["role"], one["state"]) for instance, one in services.items()}
    assert roles[leader.instance_id] == ("leader", "ready")
    assert roles[standby.instance_id] == ("standby", "ready")
    assert roles["trainer-2"] == ("standby", "standby")
    assert services["trainer-2"]["address"] == "host-of-trainer-2"
    assert {one["version"] for one in shown["services"]} == {version(DISTRIBUTION)}
    assert shown["missing"] == [*("trainer", "prefill", "decode", "router", "gateway", "runner")]
    assert (shown["scheduler"]["queued"], shown["trainer"]) == (2, None)
    assert "0 of 1 fitting trainer" in shown["errors"]["trainer"]
    lines = (await show(etcd, cluster, key)).stdout.splitlines()
    assert "trained: 0 groups" in lines
    assert any(line.startswith("queue: running; windowed: H 0, ") for line in lines)
    assert any("trainer-2" in line and "standby" in line for line in lines)

    campaign.cancel()
    await asyncio.wait({campaign})
    assert not await stands_by()
    await first.resign()


async def test_top_is_live_in_a_terminal_and_ends_with_q(
    etcd: EtcdServer, cluster: str, coordinator: Coordinator, tmp_path: Path
) -> None:
    """It shows a process that registers meanwhile; the terminal is then as before. Without a
    terminal it is one snapshot."""
    key = tmp_path / "key"
    Keyring.generate(key)
    holder = await Coordinator.connect(
        etcd.endpoint, cluster=cluster, signatures=Security(Keyring.from_file(key))
    )
    await holder.register("pool", "pool-1", "127.0.0.1:9", ttl_s=30.0)
    words = ("--etcd", etcd.endpoint, "--cluster", cluster, "--key-file", str(key))
    ended = await run_command("top", *words)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "pool-1" in ended.stdout and "\x1b" not in ended.stdout
    ours, theirs = os.openpty()
    before = termios.tcgetattr(theirs)
    argv = [sys.executable, "-m", "forge.cli.main", "top", *words, "--every", "1s"]
    terminal = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "40"}
    live = subprocess.Popen(argv, stdin=theirs, stdout=theirs, stderr=theirs, env=terminal)
    screen = bytearray()
    try:

        def read_until(part: bytes) -> None:
            while part not in screen:
                screen.extend(os.read(ours, 4096))

        await asyncio.to_thread(read_until, b"pool-1")
        await holder.register("pool", "pool-2", "127.0.0.1:9", ttl_s=30.0)
        await asyncio.to_thread(read_until, b"pool-2")
        os.write(ours, b"xq")
        # What it still writes must be read, or its end waits.
        await asyncio.to_thread(read_until, b"\x1b[?1049l")
        assert await asyncio.to_thread(live.wait, 60) == 0
        assert termios.tcgetattr(theirs) == before
    finally:
        live.kill()
        live.wait()
        os.close(ours)
        os.close(theirs)
        await holder.close()
