"""`forge run` from start to end, with every process real."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest

from forge.cli.connection import of_run
from forge.client.pool import PoolReader
from forge.v1 import common_pb2, pool_pb2
from tests.support.suite.forge_run import ForgeRun, still_alive, wait_for_death

pytestmark = pytest.mark.timeout(600)


def test_run_trains_and_prints_the_table(tmp_path: Path, forge_root: Path) -> None:
    """A run ends with exit code 0, a table per domain, and weights published through the stream;
    held-out tasks were evaluated on the way."""
    extra = ("--eval-every-steps", "1")
    run = ForgeRun(tmp_path / "run", root=forge_root, steps=3, extra=extra)
    run.start()
    run.wait_for_step(1)
    pids = run.stack_pids()
    assert run.finish() == 0, run.explain()
    output = run.output()
    for domain in ("reasoning", "qa", "code", "general", "all"):
        assert re.search(rf"{domain} .*\d\.\d\d\d .*\d\.\d\d\d .*[+-]\d\.\d\d\d", output), output
    version = re.search(r"weight version (\d+)", output)
    assert version and int(version[1]) >= 4, output
    assert "kept model" in output and "sha256 equal to the weights served" in output, output
    assert run.state()["phase"] == "done"
    assert still_alive(pids) == []
    steps = run.metrics()
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert all(step["merge_ratio"] > 1 for step in steps)
    assert (run.directory / "curves.svg").exists()
    first, *_ = run.evaluations()
    assert first["step"] == 1 and 2 <= first["min_weight_version"] <= first["max_weight_version"]
    assert set(first["domains"]) == {"reasoning", "qa", "code", "general"}
    # Two tasks a domain, one attempt each.
    assert first["rollouts"] == 8 and first["length_tokens"] > 0
    assert "held-out after step 1 " in output and "while training" in output


def test_interrupted_run_leaves_no_process_and_resumes(tmp_path: Path, forge_root: Path) -> None:
    """Ctrl-C stops every process; the same command continues from its step. No training rollout got
    the prompt of a held-out task."""
    # More steps than it can take before the interrupt, however late that is.
    run = ForgeRun(tmp_path / "run", root=forge_root, steps=1000)
    run.start()
    run.wait_for_step(1)
    pids = run.stack_pids()
    trained, held_out = asyncio.run(sampled_prompts(run.directory))
    assert len(trained) >= 8 and len(held_out) == 8
    assert not trained & held_out
    assert run.interrupt() == 130, run.explain()
    assert still_alive(pids) == []
    assert run.state()["phase"] == "train"

    run.steps = int(run.metrics()[-1]["step"]) + 2
    run.start()
    assert run.finish() == 0, run.explain()
    assert "Resuming" in run.output()
    assert run.state()["phase"] == "done"
    assert sorted({step["step"] for step in run.metrics()}) == list(range(1, run.steps + 1))


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
                kind = trajectory.task_id.partition("-")[0]
                found[kind].add(json.dumps(said["messages"]))
    return found["train"], found["eval"]


def test_nothing_survives_a_killed_run(tmp_path: Path, forge_root: Path) -> None:
    """kill -9 of `forge run` itself takes every process it started with it."""
    run = ForgeRun(tmp_path / "run", root=forge_root, steps=3)
    run.start()
    run.wait_until(lambda: "pool is ready" in run.output(), "the pool")
    pids = run.stack_pids()
    run.process.kill()
    run.process.wait(timeout=30)
    wait_for_death(pids)
