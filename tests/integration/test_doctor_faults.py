"""`forge doctor` on a host with many faults at once; `test_observation` has one without."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import pytest_asyncio
import trustme
from etcd3aio._protobuf import AlarmRequest, MaintenanceStub

from forge.runtime.coordination import Coordinator
from forge.runtime.rpc.clock import ClockServicer
from forge.runtime.security.credentials import Security
from forge.runtime.security.tokens import Keyring
from forge.v1 import clock_pb2, clock_pb2_grpc
from tests.support.gateway.chat_templates import save_model
from tests.support.runtime.etcd import Certificates, EtcdServer

pytestmark = pytest.mark.faults

HOURS_S = 3600.0


class ClockAhead(ClockServicer):
    """Two hours ahead."""

    async def GetClock(
        self, request: clock_pb2.GetClockRequest, context: Any
    ) -> clock_pb2.GetClockResponse:
        return clock_pb2.GetClockResponse(unix_s=time.time() + 2 * HOURS_S)


class Host:
    """A settings directory, an etcd with two services, and what `forge doctor` says of them."""

    def __init__(self, folder: Path, etcd: EtcdServer) -> None:
        self.folder, self.etcd = folder, etcd
        self.settings, self.packages, self.programs = (
            folder / name for name in ("settings", "packages", "programs")
        )
        self.key = folder / "key"
        for directory in (self.settings, self.packages, self.programs):
            directory.mkdir()
        Keyring.generate(self.key)

    def write(self, service: str, **settings: str | int) -> None:
        lines = [f"{key} = {value!r}".replace("'", '"') for key, value in settings.items()]
        (self.settings / f"{service}.toml").write_text("\n".join(lines) + "\n")

    def pretend_installed(self, name: str, version: str, package: str) -> None:
        """Metadata of a distribution, as pip leaves them."""
        info = self.packages / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "top_level.txt").write_text(f"{package}\n")

    async def doctor(self) -> tuple[int, dict[str, str]]:
        """The exit code, and the problems with their remedies."""
        words = ["--settings", str(self.settings), "--etcd", self.etcd.endpoint]
        words += ["--cluster", "doctored", "--key-file", str(self.key), "--root", str(self.folder)]
        environ = {
            **os.environ,
            "PYTHONPATH": str(self.packages),
            "PATH": f"{self.programs}:{os.environ['PATH']}",
        }
        argv = [sys.executable, "-m", "forge.cli.main", "doctor", *words]
        ended = await asyncio.to_thread(
            subprocess.run, argv, capture_output=True, text=True, env=environ, timeout=240
        )
        assert not ended.stderr, ended.stderr
        lines = ended.stdout.splitlines()
        return ended.returncode, {
            line.removeprefix("BAD "): remedy.strip()
            for line, remedy in zip(lines, [*lines[1:], ""], strict=True)
            if line.startswith("BAD ")
        }


@pytest_asyncio.fixture
async def host(tmp_path: Path, own_etcd: EtcdServer) -> AsyncIterator[Host]:
    """Its two services have the right time."""
    made = Host(tmp_path, own_etcd)
    holder = await Coordinator.connect(
        own_etcd.endpoint,
        cluster="doctored",
        signatures=Security(Keyring.from_file(made.key)),
    )
    servers = [await serve(holder, name, ClockServicer()) for name in ("pool-1", "gateway-1")]
    yield made
    await holder.close()
    for server in servers:
        await server.stop(0)


def is_of_machine(problem: str) -> bool:
    """Whether a finding depends on the machine of the tests: its memory, and the space and speed of
    its disk."""
    return "of memory available" in problem or "GiB free" in problem


async def serve(holder: Coordinator, name: str, clock: ClockServicer) -> grpc.aio.Server:
    """A registered process that tells its time and nothing else."""
    server = grpc.aio.server()
    clock_pb2_grpc.add_ClockServiceServicer_to_server(clock, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    await holder.register(name.partition("-")[0], name, f"127.0.0.1:{port}", ttl_s=60.0)
    return server


async def test_all_faults_of_a_host_are_named_with_their_remedies(
    host: Host, taken_port: int
) -> None:
    """Packages, import names, sandbox, settings, port, certificates, disk, GPU, template, etcd and
    clock; no other problem is found, and the exit code is 1."""
    host.pretend_installed("structlog", "20.1.0", "structlog")
    host.pretend_installed("forge-notebook", "1.0", "forge")
    broken = host.programs / "bwrap"
    broken.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1")
    broken.chmod(0o755)
    authority = trustme.CA()
    expired = authority.issue_cert("other.example", not_after=datetime.now(UTC) - timedelta(days=2))
    files = Certificates.issue(host.folder / "tls", authority=authority)
    Path(files.cert).write_bytes(b"".join(pem.bytes() for pem in expired.cert_chain_pems))
    expired.private_key_pem.write_to_path(files.key)
    Path(files.key).chmod(0o644)
    save_model("renumbered", host.folder / "model")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as in_memory:
        host.write("pool", data_dir=in_memory, port=taken_port)
        host.write("scheduler", drian_s=1)
        host.write("trainer", device="cuda:0")
        host.write(
            "gateway",
            model_path=str(host.folder / "model"),
            tls_cert=files.cert,
            tls_key=files.key,
            tls_ca=files.ca,
        )
        async with grpc.aio.insecure_channel(host.etcd.endpoint) as channel:
            holder = await Coordinator.connect(
                host.etcd.endpoint,
                cluster="doctored",
                signatures=Security(Keyring.from_file(host.key)),
            )
            late = await serve(holder, "scheduler-1", ClockAhead())
            await MaintenanceStub(channel).Alarm(AlarmRequest(action=1, alarm=1))
            code, problems = await host.doctor()
            await holder.close()
            await late.stop(0)
    expected = {
        "packages: structlog 20.1.0 is not": "Run `make setup`",
        "forge-notebook 1.0 has a package forge too": "Uninstall it",
        "no sandbox for programs": "To do: ",
        "no sandbox for commands and reward functions": "To do: ",
        "scheduler: ": "Correct it in",
        f"port {taken_port} (port of pool) on 127.0.0.1: address already in use by ": "Stop that",
        f"{files.cert} expired on ": "Issue it again where the CA is",
        f"{files.cert} is for other.example, and others reach this host as 127.0.0.1": "Issue it",
        f"{files.key} can be read by every user": "chmod o-r",
        f"{in_memory} is in memory (tmpfs) and lost at a reboot": "Mount a disk there",
        "trainer: device = 'cuda:0' is not available on rank 0: ": "Correct it in",
        "chat template of ": "Each such turn is a branch",
        f"etcd at {host.etcd.endpoint}: alarm:NOSPACE": "It refuses writes: etcdctl compact",
        "the clock of scheduler-1 at ": "On the host of that address, set it by NTP",
    }
    found = {line: one for line, one in problems.items() if not is_of_machine(line)}
    assert len(found) == len(expected), "\n".join(problems)
    for begin, remedy in expected.items():
        (line,) = [line for line in found if line.startswith(begin)] or [begin]
        assert found.get(line, "").startswith(remedy), (line, problems)
    assert code == 1
