"""`forge run` from start to end, with every process real.

One run is interrupted, resumed and joined by further services; the tests read what it left.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from forge.cli.connection import of_run
from forge.client.operator import Operator
from forge.client.stored.pool import PoolReader
from forge.runtime.coordination import Coordinator, Instance
from forge.runtime.security.credentials import Security
from forge.runtime.security.tokens import Keyring
from forge.v1 import common_pb2, pool_pb2, scheduler_pb2
from tests.support.runtime.otlp_collector import Collector, collecting
from tests.support.suite.forge_run import LIMIT_S, ForgeRun, still_alive, wait_for_death

pytestmark = pytest.mark.timeout(1800)

DOMAINS = {"reasoning", "qa", "code", "general"}
SMALL = (
    *("--eval-every-steps", "1"),
    *("--set", "scheduler.queue.concurrency=16", "--set", "scheduler.queue.batch_groups=4"),
)
JOIN_STEPS = 4
"""Steps of the resumed run: work for services that join after the first of them."""
NEWCOMERS = {
    "decode-2": ("services.inference", {"role": "decode"}, "forge_rpc_calls_total"),
    "gateway-2": ("services.gateway", {}, "forge_gateway_turns_total"),
    "pool-2": ("services.pool", {"shard": "1"}, "forge_pool_commands_total"),
}
"""What is started in mid-run, and the counter that shows it was given work."""


@dataclass(kw_only=True)
class Observed:
    """What was seen of the run while it lasted."""

    run: ForgeRun
    trained: set[str]
    """First messages of the rollouts of training tasks."""
    held_out: set[str]
    interrupt_code: int
    outlived: list[int]
    """Processes that the interrupt left."""
    interrupted_phase: object
    exit_code: int
    work: dict[str, float]
    """Count of each newcomer."""
    collector: Collector
    """The traces of every second rollout or so."""


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def observed(
    tmp_path_factory: pytest.TempPathFactory, forge_root: Path
) -> AsyncIterator[Observed]:
    """A run that has ended."""
    with collecting() as (collector, endpoint), pytest.MonkeyPatch.context() as variables:
        variables.setenv("FORGE_TRACING__ENDPOINT", endpoint)
        variables.setenv("FORGE_TRACING__SAMPLE_RATIO", "0.5")
        yield await observe(tmp_path_factory.mktemp("whole") / "run", forge_root, collector)


async def observe(directory: Path, forge_root: Path, collector: Collector) -> Observed:
    """Start the run, interrupt it, resume it with newcomers."""
    # More steps than it can take before the interrupt, however late that is.
    run = ForgeRun(directory, root=forge_root, steps=1000, extra=SMALL)
    run.start()
    await asyncio.to_thread(run.wait_for_step, 1)
    pids = run.stack_pids()
    trained, held_out = await sampled_prompts(directory)
    # Recorded first, then printed by the next look at the run.
    evaluated = "held-out after step 1 "
    await asyncio.to_thread(run.wait_until, lambda: evaluated in run.output(), "an evaluation")
    interrupt_code = await asyncio.to_thread(run.interrupt)
    outlived, phase = still_alive(pids), run.state()["phase"]

    taken = int(run.metrics()[-1]["step"])
    run.steps = taken + JOIN_STEPS
    run.start()
    await asyncio.to_thread(run.wait_for_step, taken + 1)
    exit_code, work = await joined(run)
    return Observed(
        run=run,
        trained=trained,
        held_out=held_out,
        interrupt_code=interrupt_code,
        outlived=outlived,
        interrupted_phase=phase,
        exit_code=exit_code,
        work=work,
        collector=collector,
    )


async def sampled_prompts(directory: Path) -> tuple[set[str], set[str]]:
    """First messages of the recorded rollouts of a running run: trained on, and held out."""
    found: dict[str, set[str]] = {"train": set(), "eval": set()}
    async with of_run(directory).open() as (coordinator, channels):
        pool = PoolReader(coordinator, channels)
        wanted = pool_pb2.TrajectoryFilter(state=common_pb2.TRAJECTORY_STATE_SEALED)
        async for page in pool.query(wanted):
            ids = [each.trajectory_id for each in page.trajectories]
            async for trajectory in pool.fetch(page.shard, ids, on_damage=pytest.fail):
                said = json.loads(trajectory.turns[0].messages_json)
                kind = "train" if trajectory.task_id.startswith("train-") else "eval"
                found[kind].add(json.dumps(said["messages"]))
    return found["train"], found["eval"]


async def joined(run: ForgeRun) -> tuple[int, dict[str, float]]:
    """Start the newcomers in a run, and wait for its end: its exit code and their work."""
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
        exit_code = await asyncio.to_thread(run.finish)
        return exit_code, {
            each.instance_id: await asyncio.to_thread(count, each) for each in instances
        }
    finally:
        await operator.close()
        await coordinator.close()
        run.process.kill()
        for newcomer in newcomers:
            newcomer.terminate()
            newcomer.wait(timeout=LIMIT_S)


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


async def registered(coordinator: Coordinator, name: str) -> Instance:
    """The newcomer of that name, once it is there."""
    (instance,) = await coordinator.discover(name.split("-")[0]).wait(
        timeout_s=LIMIT_S, where=lambda found: found.instance_id == name
    )
    return instance


def count(instance: Instance) -> float:
    """Sum over the labels of a newcomer's counter, read from its /metrics."""
    _, _, metric = NEWCOMERS[instance.instance_id]
    address = f"http://{instance.metadata['metrics']}/metrics"
    with urllib.request.urlopen(address, timeout=60) as response:
        lines = response.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(metric))


async def test_interrupt_stops_every_process(observed: Observed) -> None:
    """Ctrl-C ends the run with 130 in the phase that it was in, and leaves no process."""
    assert observed.interrupt_code == 130, observed.run.explain()
    assert observed.outlived == []
    assert observed.interrupted_phase == "train"


async def test_held_out_tasks_are_not_trained_on(observed: Observed) -> None:
    """They are evaluated while training, and no training rollout has the prompt of one."""
    assert len(observed.trained) >= 4 and len(observed.held_out) == 8
    assert not observed.trained & observed.held_out


async def test_joining_services_share_the_work_of_a_run(observed: Observed) -> None:
    """A second decode worker, gateway and pool shard get work in the middle of a run: each joins
    by its lease."""
    assert set(observed.work) == set(NEWCOMERS)
    assert all(count > 0 for count in observed.work.values()), observed.work


async def test_resumed_run_continues_and_prints_the_table(observed: Observed) -> None:
    """The same command continues from its step and ends with exit code 0, a table per domain, and
    weights published through the stream. Held-out tasks were evaluated on the way."""
    run, output = observed.run, observed.run.output()
    assert observed.exit_code == 0, run.explain()
    assert "Resuming" in output
    assert "Trainer and workers compute in float32" in output
    for domain in (*DOMAINS, "all"):
        assert re.search(rf"{domain} .*\d\.\d\d\d .*\d\.\d\d\d .*[+-]\d\.\d\d\d", output), output
    version = re.search(r"weight version (\d+)", output)
    assert version and int(version[1]) >= 4, output
    assert "kept model" in output and "digest equal to that of the weights served" in output, output
    assert run.state()["phase"] == "done"
    steps = run.metrics()
    assert sorted({step["step"] for step in steps}) == list(range(1, run.steps + 1))
    assert all(step["merge_ratio"] > 1 for step in steps)
    assert (run.directory / "curves.svg").exists()
    first, *_ = run.evaluations()
    assert first["step"] == 1 and 2 <= first["min_weight_version"] <= first["max_weight_version"]
    assert set(first["domains"]) == DOMAINS
    # Two tasks a domain, one attempt each.
    assert first["rollouts"] == 8 and first["length_tokens"] > 0
    assert "held-out after step 1 " in output and "while training" in output


async def test_workers_of_the_trainers_host_share_its_memory(observed: Observed) -> None:
    """All versions but those of a start come that way; a worker that is not in discovery yet has a
    bulk connection."""
    ways = [
        way
        for log in (observed.run.directory / "logs").glob("*.log")
        for line in log.read_text(errors="replace").splitlines()
        if "weights_swapped" in line
        for way in re.findall(r"way\W{1,4}(\w+)", line)
    ]
    assert set(ways) == {"bulk", "memory"} and ways.count("memory") > ways.count("bulk"), ways


async def test_one_sample_is_one_trace_through_every_service(observed: Observed) -> None:
    """From the runner over gateway, router and engines to the pool and the trainer: one root, each
    other span below one of the trace. The step that trained it is linked in both directions."""
    traces = observed.collector.by_trace()
    whole = [
        spans
        for spans in traces.values()
        if {"rollout", "train_rollout"} <= {span.name for span in spans}
    ]
    assert whole, {span.name for spans in traces.values() for span in spans}
    steps = {
        span.span_id: span
        for spans in traces.values()
        for span in spans
        if span.name == "train_step"
    }
    for spans in whole:
        ids = {span.span_id: span for span in spans}
        (root,) = [span for span in spans if span.parent_id not in ids]
        assert (root.name, root.service, root.parent_id) == ("rollout", "forge-runner", "")
        services = {span.name.split(" ")[0]: span.service for span in spans}
        assert services["chat"] == "forge-gateway"
        assert services["sample"] == services["forge.v1.DecodeService/Decode"] == "forge-inference"
        assert services["append_turn"] == "forge-pool"
        assert services["train_rollout"] == "forge-trainer"
        for span in spans:
            if span.name in ("append_turn", "sample", "train_rollout"):
                assert ids[span.parent_id].name.startswith(("chat ", "text_completion "))
            if span.name == "forge.v1.DecodeService/Decode":
                assert ids[span.parent_id].name == "sample"
            if span.name == "train_rollout":
                (step,) = span.links
                assert span.parent_id in steps[step].links


@pytest.mark.faults
def test_killed_run_leaves_no_process(tmp_path: Path, forge_root: Path) -> None:
    """kill -9 of `forge run` itself takes every process it started with it."""
    run = ForgeRun(tmp_path / "run", root=forge_root, steps=3)
    run.start()
    run.wait_until(lambda: "pool is ready" in run.output(), "the pool")
    pids = run.stack_pids()
    run.process.kill()
    run.process.wait(timeout=30)
    wait_for_death(pids)
