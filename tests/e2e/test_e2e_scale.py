"""Scaling one service is starting one more instance: it joins by its lease, in mid-run."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from forge.client.operator import Operator
from forge.runtime.coordination import Coordinator, Instance
from forge.runtime.security import Security
from forge.runtime.security.tokens import Keyring
from forge.v1 import scheduler_pb2
from tests.support.suite.forge_run import LIMIT_S, ForgeRun

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


async def test_joining_services_share_the_work_of_a_run(tmp_path: Path, forge_root: Path) -> None:
    """A second decode worker, gateway and pool shard get work in the middle of a run."""
    run = ForgeRun(tmp_path / "run", root=forge_root, steps=16)
    run.start()
    await asyncio.to_thread(run.wait_for_step, 1)
    endpoints = (run.directory / "etcd.endpoints").read_text().strip()
    security = Security(Keyring.from_file(run.directory / "key"))
    operator = await Operator.connect(endpoints, cluster=run.directory.name, security=security)
    coordinator = await Coordinator.connect(endpoints, cluster=run.directory.name)
    newcomers: list[subprocess.Popen[bytes]] = []
    try:
        # However long they take to come, the run has work for them.
        await operator.set_activity(scheduler_pb2.ACTIVITY_PAUSED)
        newcomers = [start_newcomer(run, name) for name in NEWCOMERS]
        instances = [await registered(coordinator, name) for name in NEWCOMERS]
        await operator.set_activity(scheduler_pb2.ACTIVITY_RUNNING)
        assert await asyncio.to_thread(run.finish) == 0, run.explain()
        for instance in instances:
            _, _, metric = NEWCOMERS[instance.instance_id]
            assert await asyncio.to_thread(count, instance, metric) > 0, instance
    finally:
        await operator.close()
        await coordinator.close()
        run.process.kill()
        for newcomer in newcomers:
            newcomer.terminate()
            newcomer.wait(timeout=LIMIT_S)


async def registered(coordinator: Coordinator, name: str) -> Instance:
    """The newcomer of that name, once it is there."""
    (instance,) = await coordinator.discover(name.split("-")[0]).wait(
        timeout_s=LIMIT_S, where=lambda found: found.instance_id == name
    )
    return instance
