"""Scaling one service is starting one more instance: it joins by its lease, in mid-run."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from forge.runtime.coordination import Coordinator, Instance
from tests.support.forge_run import ForgeRun

pytestmark = pytest.mark.timeout(900)

NEWCOMERS = {
    "decode-2": ("services.inference", {"role": "decode"}, "forge_rpc_calls_total"),
    "gateway-2": ("services.gateway", {}, "forge_gateway_turns_total"),
    "pool-2": ("services.pool", {"shard": "1"}, "forge_pool_commands_total"),
}
"""What is started in mid-run, and the counter that shows it was given work."""


def start_newcomer(run: ForgeRun, name: str) -> subprocess.Popen[bytes]:
    module, settings, _ = NEWCOMERS[name]
    shared = {
        "cluster": run.directory.name,
        "etcd": (run.directory / "etcd.endpoints").read_text().strip(),
        "key_file": str(run.directory / "key"),
        "instance_id": name,
    }
    if module == "services.pool":
        shared["data_dir"] = str(run.directory / "pool" / "1")
    else:
        shared["model_path"] = str(run.state()["model_path"])
    flags = [f"--{k.replace('_', '-')}={v}" for k, v in (shared | settings).items()]
    with (run.directory / "logs" / f"{name}.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", module, *flags], stdout=log, stderr=log, env=dict(os.environ)
        )


def count(instance: Instance, metric: str) -> float:
    """Sum over the labels of one counter, read from the instance's /metrics."""
    address = f"http://{instance.metadata['metrics']}/metrics"
    with urllib.request.urlopen(address, timeout=10) as response:
        lines = response.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(metric))


async def until(condition: Callable[[], bool], run: ForgeRun, what: str) -> None:
    await asyncio.to_thread(run.wait_until, condition, what)


async def test_newcomers_join_by_their_lease_and_share_the_work(
    tmp_path: Path, forge_root: Path
) -> None:
    """A second decode worker, gateway and pool shard take work in the middle of a run."""
    run = ForgeRun(tmp_path / "run", root=forge_root, steps=48)
    run.start()
    await asyncio.to_thread(run.wait_for_step, 1)
    newcomers = {name: start_newcomer(run, name) for name in NEWCOMERS}
    endpoints = (run.directory / "etcd.endpoints").read_text().strip()
    coordinator = await Coordinator.connect(endpoints, cluster=run.directory.name)
    try:
        for name, (_, _, metric) in NEWCOMERS.items():
            discovery = coordinator.discover(name.split("-")[0])
            named = lambda instance, name=name: instance.instance_id == name  # noqa: E731
            (instance,) = await discovery.wait(timeout_s=120, where=named)
            await until(lambda i=instance, m=metric: count(i, m) > 0, run, f"work at {name}")  # type: ignore[misc]
    finally:
        await coordinator.close()
        code = await asyncio.to_thread(run.finish)
        for newcomer in newcomers.values():
            newcomer.terminate()
            newcomer.wait(timeout=30)
    assert code == 0, run.explain()
