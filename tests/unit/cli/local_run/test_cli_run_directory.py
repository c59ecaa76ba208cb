"""Run directories of `forge up`, and their files after a loss of power."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from forge.cli.connection import of_run
from forge.cli.local_run import training_run
from forge.cli.local_run.presets import parse_overrides
from forge.cli.local_run.run_options import RunOptions
from forge.cli.local_run.training_run import check_run, directory_of, open_run, resumed
from forge.cli.rundir import RunDirectory, RunState
from forge.core.errors import FailedPrecondition

STATE = RunState(model="tiny", model_path="/models/tiny", seed=0, steps=3)


async def test_campaign_does_not_continue_a_directory_of_forge_up(tmp_path: Path) -> None:
    """Its queue may have tasks of others. `forge run` without a directory begins a new one, and
    with it says how to continue; `forge up` continues both kinds."""
    options = RunOptions(root=tmp_path, model=str(tmp_path), seed=0)
    directory = directory_of(options, campaign=False)
    directory.create()
    state = await open_run(options, directory, campaign=False)
    assert not state.campaign
    assert await open_run(options, directory, campaign=False) == state
    assert directory_of(options, campaign=False).path == directory.path
    assert directory_of(options, campaign=True).path != directory.path
    named = replace(options, run_dir=directory.path)
    with pytest.raises(FailedPrecondition, match=f"`forge up --run-dir {directory.path}`"):
        await check_run(named, directory)
    directory.etcd_endpoints.write_text("127.0.0.1:1\n")
    with pytest.raises(FailedPrecondition) as stopped:
        of_run(directory.path)
    assert "forge run" not in str(stopped.value)


async def test_resumed_run_keeps_its_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that are given again win; the first line has the others."""
    said: list[str] = []
    monkeypatch.setattr(training_run, "say", said.append)
    loss, rate = "trainer.objective.algorithm=gspo", "trainer.optimizer.learning_rate=1e-4"
    python = tmp_path / "python"
    first = RunOptions(
        root=tmp_path,
        model=str(tmp_path),
        run_dir=tmp_path / "run",
        engine="vllm",
        engine_python=python,
        overrides=[loss, rate],
    )
    directory = directory_of(first, campaign=True)
    assert resumed(first, directory) == first
    await open_run(first, directory)
    assert not said

    again = resumed(RunOptions(run_dir=directory.path), directory)
    assert (again.engine, again.engine_python, again.settings) == ("vllm", python, first.settings)
    kept = f"--engine vllm --engine-python {python} --set {loss} --set {rate}"
    assert said == [f"Taken over from {directory.path}: {kept}"]
    state = await open_run(again, directory)

    faster = rate.replace("1e-4", "1e-3")
    other = resumed(RunOptions(engine="embedded", overrides=[faster]), directory)
    assert (other.engine, other.engine_python) == ("embedded", None)
    assert other.settings == parse_overrides([loss, faster])
    assert (await open_run(other, directory)).options != state.options


@pytest.mark.parametrize(
    ("kept", "given", "expected"),
    [
        (
            {"trainer_processes": 2, "overrides": ["trainer.seed=3"]},
            RunOptions(overrides=["trainer.ranks=4"]),
            RunOptions(overrides=["trainer.seed=3", "trainer.ranks=4"]),
        ),
        (
            {"overrides": ["trainer.ranks=4", "trainer.seed=3"]},
            RunOptions(trainer_processes=2),
            RunOptions(trainer_processes=2, overrides=["trainer.seed=3"]),
        ),
        (
            {"overrides": [f"{one}.device=cuda:1" for one in ("trainer", "prefill", "decode")]},
            RunOptions(device="cpu"),
            RunOptions(device="cpu"),
        ),
        (
            {"overrides": ["trainer.max_steps=5"]},
            RunOptions(steps=9),
            RunOptions(steps=9),
        ),
        (
            {"overrides": ["trainer.evaluation.every_steps=5"]},
            RunOptions(eval_every_steps=9),
            RunOptions(eval_every_steps=9),
        ),
    ],
    ids=["ranks", "trainer-processes", "device", "steps", "eval-every-steps"],
)
def test_given_option_replaces_a_kept_one_of_another_name(
    kept: dict[str, Any], given: RunOptions, expected: RunOptions
) -> None:
    """Else the two would contradict each other, and the run would be refused."""
    assert given.resuming(kept)[0] == expected


def test_run_of_an_earlier_release_has_no_options(tmp_path: Path) -> None:
    """Its state opens."""
    directory = RunDirectory(tmp_path / "run")
    directory.create()
    former = asdict(STATE)
    del former["options"]
    (directory.path / "run.json").write_text(json.dumps(former))
    assert directory.load() == STATE


def test_state_of_a_run_is_on_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loss of power leaves the former one. First the file, then the directory."""
    synced: list[str] = []
    fsync = os.fsync

    def note(descriptor: int) -> None:
        synced.append(Path(f"/proc/self/fd/{descriptor}").readlink().name.split(".")[0])
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    directory = RunDirectory(tmp_path / "directory")
    directory.create()
    synced.clear()
    directory.save(STATE)
    assert synced == ["run", "directory"]
