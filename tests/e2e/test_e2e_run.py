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


def test_interrupted_run_resumes_and_prints_the_table(tmp_path: Path, forge_root: Path) -> None:
    """Ctrl-C stops every process; the same command continues from its step and ends with exit code
    0, a table per domain, and weights published through the stream. Held-out tasks were evaluated
    on the way, and no training rollout got the prompt of one."""
    extra = ("--eval-every-steps", "1")
    # More steps than it can take before the interrupt, however late that is.
    run = ForgeRun(tmp_path / "run", root=forge_root, steps=1000, extra=extra)
    run.start()
    run.wait_for_step(1)
    pids = run.stack_pids()
    trained, held_out = asyncio.run(sampled_prompts(run.directory))
    assert len(trained) >= 8 and len(held_out) == 8
    assert not trained & held_out
    # Recorded first, then printed by the next look at the run.
    run.wait_until(lambda: "held-out after step 1 " in run.output(), "a printed evaluation")
    assert run.interrupt() == 130, run.explain()
    assert still_alive(pids) == []
    assert run.state()["phase"] == "train"

    run.steps = max(3, int(run.metrics()[-1]["step"]) + 1)
    run.start()
    run.wait_until(lambda: "Resuming" in run.output(), "the resume")
    assert run.finish() == 0, run.explain()
    output = run.output()
    for domain in ("reasoning", "qa", "code", "general", "all"):
        assert re.search(rf"{domain} .*\d\.\d\d\d .*\d\.\d\d\d .*[+-]\d\.\d\d\d", output), output
    version = re.search(r"weight version (\d+)", output)
    assert version and int(version[1]) >= 4, output
    assert "kept model" in output and "sha256 equal to the weights served" in output, output
    assert run.state()["phase"] == "done"
    steps = run.metrics()
    assert sorted({step["step"] for step in steps}) == list(range(1, run.steps + 1))
    assert all(step["merge_ratio"] > 1 for step in steps)
    assert (run.directory / "curves.svg").exists()
    first, *_ = run.evaluations()
    assert first["step"] == 1 and 2 <= first["min_weight_version"] <= first["max_weight_version"]
    assert set(first["domains"]) == {"reasoning", "qa", "code", "general"}
    # Two tasks a domain, one attempt each.
    assert first["rollouts"] == 8 and first["length_tokens"] > 0
    assert "held-out after step 1 " in output and "while training" in output


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


def test_killed_run_leaves_no_process(tmp_path: Path, forge_root: Path) -> None:
    """kill -9 of `forge run` itself takes every process it started with it."""
    run = ForgeRun(tmp_path / "run", root=forge_root, steps=3)
    run.start()
    run.wait_until(lambda: "pool is ready" in run.output(), "the pool")
    pids = run.stack_pids()
    run.process.kill()
    run.process.wait(timeout=30)
    wait_for_death(pids)
