"""`forge status` of a system of which little is there."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

from forge.runtime.coordination import Coordinator
from forge.runtime.security import Security
from forge.runtime.tokens import Keyring
from tests.support.runtime.etcd import EtcdServer

ADDRESS = "a-host-with-a-long-name.in.some.rack.example:65535"


async def test_what_is_missing_is_told_and_not_waited_for(
    etcd: EtcdServer, cluster: str, coordinator: Coordinator, tmp_path: Path
) -> None:
    """Standard output has the answer alone: who is there, to the last character, and who is not."""
    key = tmp_path / "key"
    Keyring.generate(key)
    key_holder = await Coordinator.connect(
        etcd.endpoint, cluster=cluster, signatures=Security(Keyring.from_file(key))
    )
    await key_holder.register("pool", "pool-1", ADDRESS, metadata={}, ttl_s=30.0)
    words = ("status", "--etcd", etcd.endpoint, "--cluster", cluster, "--key-file", str(key))
    ended = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "forge.cli.main", *words],
        capture_output=True,
        text=True,
        timeout=60,
    )
    await key_holder.close()
    assert (ended.returncode, ended.stderr) == (0, "")
    cells = [[cell.strip() for cell in line.split("│")] for line in ended.stdout.splitlines()]
    rows = [row for row in cells if len(row) > 3]
    assert "".join(row[3] for row in rows) == ADDRESS
    assert [row[1] for row in rows if row[2] == "none"] == [
        *("scheduler", "trainer", "prefill", "decode", "router", "gateway")
    ]
    for kind in ("scheduler", "router", "trainer"):
        assert f"0 of 1 fitting {kind} instances in cluster '{cluster}'" in ended.stdout
    assert "rpc_retried" not in ended.stdout
