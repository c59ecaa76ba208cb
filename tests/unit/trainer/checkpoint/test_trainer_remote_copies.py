"""Copies of checkpoints at URLs of fsspec: complete, or they do not count."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fsspec
import pytest

from forge.core.errors import ConfigError, Unavailable
from forge.v1 import trainer_pb2 as pb
from services.trainer.checkpoint.history import CheckpointHistory
from services.trainer.checkpoint.remote_copies import RemoteCopies, newest_step
from services.trainer.checkpoint.retention import CheckpointRetention
from services.trainer.checkpoint.store import CheckpointStore, read_checkpoint


@pytest.fixture(params=["file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "memory":
        fsspec.filesystem("memory").store.clear()
        return "memory://bucket/run"
    return f"file://{tmp_path}/remote"


def saved(directory: Path, step: int, lineage: str = "l", fence: int = 1) -> Path:
    def write(folder: Path) -> None:
        (folder / "state").mkdir()
        (folder / "state" / "rank-00000.safetensors").write_bytes(bytes([step]) * 100)

    return CheckpointStore(directory).save(
        write,
        step=step,
        weight_version=step,
        history=CheckpointHistory([pb.StepMetrics(step=step)]),
        lineage=lineage,
        fence=fence,
    )


def test_copy_is_the_same_checkpoint(url: str, tmp_path: Path) -> None:
    """With all files in their folders; one that is not newer is not fetched, nor one of another
    lineage."""
    copies, other = RemoteCopies(url, CheckpointRetention()), tmp_path / "other"
    path = saved(tmp_path / "own", 3)
    copies.put(path)
    assert copies.fetch_newer(other, lineage="another", after=0) == 0
    assert copies.fetch_newer(other, lineage="l", after=3) == 0
    assert copies.fetch_newer(other, lineage="l", after=2) == 3 == newest_step(other)
    found, expected = read_checkpoint(other / path.name), read_checkpoint(path)
    assert (found.step, found.fingerprint) == (3, expected.fingerprint)
    for file in path.rglob("*"):
        if file.is_file():
            assert (other / path.name / file.relative_to(path)).read_bytes() == file.read_bytes()


def test_copies_are_kept_by_the_same_rule(url: str, tmp_path: Path) -> None:
    copies = RemoteCopies(url, CheckpointRetention(last=1, every_steps=10))
    for step in (10, 12, 14):
        copies.put(saved(tmp_path / "own", step))
    assert copies.steps() == [10, 14]


def test_new_lineage_keeps_its_copies_beside_those_of_an_ended_one(
    url: str, tmp_path: Path
) -> None:
    """At the same URL: later steps of the ended lineage do not count, and stay."""
    copies = RemoteCopies(url, CheckpointRetention(last=2))
    for step in (98, 100):
        copies.put(saved(tmp_path / "ended", step, "ended", fence=3))
    for step in (2, 4, 6):
        copies.put(saved(tmp_path / "own", step, "new", fence=7))
    assert copies.steps() == [4, 6, 98, 100]
    assert copies.fetch_newer(tmp_path / "other", lineage="new", after=0) == 6
    assert copies.fetch_newer(tmp_path / "any", lineage="", after=0) == 6


def test_copies_of_undone_steps_are_removed(url: str, tmp_path: Path) -> None:
    """A rewind has undone them; a former trainer that ends its copy late removes none."""
    copies = RemoteCopies(url, CheckpointRetention(last=2))
    for step in (8, 10):
        copies.put(saved(tmp_path / "former", step, fence=1))
    copies.put(saved(tmp_path / "own", 9, fence=2))
    assert copies.steps() == [8, 9]
    copies.put(saved(tmp_path / "late", 7, fence=1))
    assert copies.steps() == [7, 9]
    assert copies.fetch_newer(tmp_path / "other", lineage="l", after=0) == 9


def test_copy_that_was_cut_does_not_count(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The former copy stays the newest, and the next attempt completes it."""
    copies = RemoteCopies(url, CheckpointRetention())
    copies.put(saved(tmp_path / "own", 1))
    later = saved(tmp_path / "own", 2)
    put = copies._files.put_file

    def cut(source: str, target: str) -> None:
        if target.endswith("state.json"):
            raise ConnectionError("reset")
        put(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(copies._files, "put_file", cut)
        with pytest.raises(Unavailable, match="ConnectionError: reset"):
            copies.put(later)
    assert copies.fetch_newer(tmp_path / "other", lineage="", after=0) == 1
    copies.put(later)
    assert copies.fetch_newer(tmp_path / "other", lineage="", after=1) == 2


@pytest.mark.parametrize("damage", ["short", "missing", "state"])
def test_damaged_copy_is_passed_over(url: str, tmp_path: Path, damage: str) -> None:
    """For the older copy: a file is short or missing, or the state file was cut."""
    copies, other = RemoteCopies(url, CheckpointRetention()), tmp_path / "other"
    for step in (1, 2):
        copies.put(saved(tmp_path / "own", step))
    folder = copies._folder(2)
    match damage:
        case "short":
            copies._files.pipe_file(f"{folder}/state/rank-00000.safetensors", b"x")
        case "missing":
            copies._files.rm(f"{folder}/state/rank-00000.safetensors")
        case "state":
            state = copies._files.cat_file(f"{folder}/state.json")
            copies._files.pipe_file(f"{folder}/state.json", state[: len(state) // 2])
    assert copies.fetch_newer(other, lineage="l", after=0) == 1 == newest_step(other)
    assert [one.name for one in other.iterdir()] == ["step-00000001"]


def test_copy_with_a_path_outside_of_it_is_refused(url: str, tmp_path: Path) -> None:
    """Nothing arrives."""
    copies, other = RemoteCopies(url, CheckpointRetention()), tmp_path / "other"
    copies.put(saved(tmp_path / "own", 2))
    file = copies._folder(2) + "/state.json"
    state: dict[str, Any] = json.loads(copies._files.cat_file(file))
    state["files"]["../../out"] = 1
    copies._files.pipe_file(file, json.dumps(state).encode())
    with pytest.raises(Unavailable, match="not a path in a checkpoint"):
        copies.fetch_newer(other, lineage="l", after=0)
    assert newest_step(other) == 0


def test_url_without_its_package_is_refused() -> None:
    """The line names the setting, and what is missing."""
    with pytest.raises(ConfigError, match=r"checkpoint.copy_to = 'nosuch://b': .*nosuch"):
        RemoteCopies("nosuch://b", CheckpointRetention())
