"""Run directories of `forge up`, and their files after a loss of power."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from forge.cli.connection import of_run
from forge.cli.local_run.run_options import RunOptions
from forge.cli.local_run.training_run import check_run, directory_of, open_run
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
