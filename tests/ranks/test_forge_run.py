"""`forge run --trainer-processes`: the trainer's ranks on this machine, from start to Ctrl-C."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from tests.support.runtime.log_lines import log_lines
from tests.support.suite.forge_run import ForgeRun, still_alive, wait_for_death

pytestmark = pytest.mark.timeout(1800)
OPTIONS = (
    *("--trainer-processes", "2", "--set", "trainer.mesh.dp_shard=2"),
    *("--set", "scheduler.queue.concurrency=16", "--set", "scheduler.queue.batch_groups=4"),
)


def rank_pid(run: ForgeRun, rank: int) -> int:
    """Process id of a rank of the trainer."""
    for child in psutil.Process(run.process.pid).children(recursive=True):
        try:
            if child.environ().get("RANK") == str(rank):
                return child.pid
        except psutil.Error:
            continue
    raise AssertionError(f"no rank {rank}:\n{run.explain()}")


def test_run_survives_a_killed_rank_and_leaves_no_process(tmp_path: Path, forge_root: Path) -> None:
    """One line names the rank, and the run continues; after Ctrl-C, and after SIGKILL of the
    command in its resumed run, no process is left."""
    run = ForgeRun(tmp_path / "run", root=forge_root, steps=1000, extra=OPTIONS)
    run.start()
    run.wait_for_step(1)
    os.kill(rank_pid(run, 1), signal.SIGKILL)
    crash = "trainer crashed (exit code 1)"
    run.wait_until(lambda: crash in run.output(), "a crash of the trainer")
    (line,) = [one for one in run.output().splitlines() if crash in one]
    assert "forge trainer: rank 1 was killed by SIGKILL" in line
    taken = last_step(run)
    run.wait_until(lambda: last_step(run) > taken, "a step after the crash")
    pids = run.stack_pids()
    assert run.interrupt() == 130
    assert still_alive(pids) == []
    log = (run.directory / "logs" / "trainer.log").read_text()
    assert "Traceback" not in log.rpartition('"draining"')[2]
    checkpoints = run.directory / "checkpoints"
    assert (checkpoints / f"step-{last_step(run):08d}").is_dir()

    run.start()
    run.wait_until(lambda: "Resuming" in run.output() and bool(rank_pids(run)), "ranks")
    pids = run.stack_pids()
    run.process.kill()
    run.process.wait()
    wait_for_death(pids)


def test_run_with_two_parts_of_each_layer_ends(tmp_path: Path, forge_root: Path) -> None:
    """With `mesh.tp = 2` it takes its steps, and keeps a model."""
    extra = tuple(one.replace("dp_shard", "tp") for one in OPTIONS)
    run = ForgeRun(tmp_path / "run", root=forge_root, steps=2, extra=extra)
    run.start()
    assert run.finish() == 0, run.explain()
    assert last_step(run) == 2
    lines = log_lines(run.directory / "logs" / "trainer.log")
    started = [one for one in lines if one["event"] == "ranks_started"]
    assert [(one["dp_shard"], one["tp"]) for one in started] == [(1, 2)]
    kept = run.directory / "checkpoints" / "step-00000002"
    assert (kept / "model.safetensors.index.json").is_file()


def last_step(run: ForgeRun) -> int:
    """The newest recorded step, which a restart takes back to the checkpoint; 0 before the
    first."""
    return max((int(one["step"]) for one in run.metrics()), default=0)


def rank_pids(run: ForgeRun) -> list[int]:
    """Process ids of the ranks that run now."""
    found = []
    for rank in range(2):
        try:
            found.append(rank_pid(run, rank))
        except AssertionError:
            return []
    return found


def test_two_numbers_of_ranks_are_refused(tmp_path: Path, forge_root: Path) -> None:
    """In one line that has both."""
    extra = (*OPTIONS, "--set", "trainer.ranks=4")
    run = ForgeRun(tmp_path / "run", root=forge_root, steps=1, extra=extra)
    run.start()
    assert run.finish() == 2
    assert "--trainer-processes 2 and --set trainer.ranks=4" in run.output()


def test_mesh_of_another_size_is_refused(tmp_path: Path, forge_root: Path) -> None:
    """Before any process starts."""
    extra = (*OPTIONS, "--set", "trainer.mesh.dp_shard=3")
    run = ForgeRun(tmp_path / "run", root=forge_root, steps=1, extra=extra)
    run.start()
    assert run.finish() == 2
    assert "trainer cannot start" in run.output()
    assert "is not allowed with 2 ranks: the mesh has 3" in run.output()
