"""Directories that are complete under their name, or absent."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from forge.core.errors import FailedPrecondition
from forge.runtime.files.unfinished import new_directory, unfinished


def fill(path: Path, text: str = "whole") -> None:
    with new_directory(path) as filling:
        (filling / "inner").mkdir()
        (filling / "inner" / "file").write_text(text)


def test_directory_replaces_what_a_killed_process_left(tmp_path: Path) -> None:
    """Nothing of it is in the new one, and nothing stays beside."""
    left = unfinished(tmp_path / "model")
    (left / "inner" / "deep").mkdir(parents=True)
    (left / "weights").write_text("half")
    (left / "link").symlink_to(tmp_path)
    fill(tmp_path / "model")
    assert [one.name for one in tmp_path.iterdir()] == ["model"]
    assert [one.name for one in (tmp_path / "model").rglob("*")] == ["inner", "file"]


def test_error_leaves_nothing(tmp_path: Path) -> None:
    """Also not the name."""
    with pytest.raises(ValueError), new_directory(tmp_path / "model") as filling:
        (filling / "file").write_text("half")
        raise ValueError
    assert not list(tmp_path.iterdir())


def test_directory_that_another_process_fills_is_refused(tmp_path: Path) -> None:
    """The other one continues."""
    with new_directory(tmp_path / "model") as filling:
        (filling / "file").write_text("whole")
        with pytest.raises(FailedPrecondition, match="another process writes"):
            fill(tmp_path / "model")
    assert (tmp_path / "model" / "file").read_text() == "whole"


def test_content_is_on_disk_before_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loss of power leaves no empty file under the name; the name itself is on disk at the
    end."""
    events: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def note_sync(descriptor: int) -> None:
        events.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        fsync(descriptor)

    def note_rename(path: Path, target: Path) -> Path:
        events.append("rename")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(Path, "rename", note_rename)
    fill(tmp_path / "model")
    assert events == ["inner", "file", ".model.unfinished", "rename", tmp_path.name]
