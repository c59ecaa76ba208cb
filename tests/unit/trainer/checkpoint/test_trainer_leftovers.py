"""Other entries beside checkpoints: an operator's copies, and what an earlier failure left."""

from __future__ import annotations

from pathlib import Path

import fsspec
import pytest

from services.trainer.checkpoint.history import CheckpointHistory
from services.trainer.checkpoint.remote_copies import RemoteCopies
from services.trainer.checkpoint.retention import CheckpointRetention
from services.trainer.checkpoint.store import CheckpointStore


def saved(store: CheckpointStore, step: int) -> Path:
    def write(folder: Path) -> None:
        (folder / "model.bin").write_bytes(bytes([step]))

    return store.save(write, step=step, weight_version=step, history=CheckpointHistory())


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_other_names_are_no_checkpoints(tmp_path: Path) -> None:
    """Retention leaves a copy under another name, and a restart passes over it."""
    store = CheckpointStore(tmp_path, CheckpointRetention(last=1))
    saved(store, 1).joinpath("model.bin").read_bytes()
    copy = tmp_path / "step-00000001.before-2"
    saved(CheckpointStore(tmp_path / "other"), 1).rename(copy)
    saved(store, 2)
    store.prune(held=())
    assert names(tmp_path) == ["latest", "other", "step-00000001.before-2", "step-00000002"]
    assert [one.path.name for one in store.newest_first()] == ["step-00000002"]


@pytest.mark.parametrize("url", ["file://{}/remote", "memory://leftovers/run"])
def test_other_names_are_no_copies(url: str, tmp_path: Path) -> None:
    """At a URL, too: further checkpoints are copied there."""
    copies = RemoteCopies(url.format(tmp_path), CheckpointRetention(last=1))
    files, root = fsspec.core.url_to_fs(url.format(tmp_path))
    files.makedirs(f"{root}/step-00000001.before-2", exist_ok=True)
    files.pipe_file(f"{root}/step-00000001.before-2/state.json", b'{"files": {}}')
    store = CheckpointStore(tmp_path / "own")
    for step in (1, 2):
        copies.put(saved(store, step))
    assert copies.steps() == [2]
    assert copies.fetch_newer(tmp_path / "new", lineage="", after=0) == 2


def test_earlier_failures_stop_no_later_checkpoint(tmp_path: Path) -> None:
    """A link that was not moved, and a directory that was not removed completely: NFS keeps the
    names of open files."""
    store = CheckpointStore(tmp_path, CheckpointRetention(last=1))
    (tmp_path / "latest.unfinished").symlink_to("step-00000000")
    (tmp_path / "step-00000001.unfinished").mkdir()
    (tmp_path / "step-00000001.unfinished" / ".nfs01").touch()
    for step in (1, 2):
        saved(store, step)
    store.prune(held=())
    assert (tmp_path / "latest").resolve().name == "step-00000002"
    assert [one.step for one in store.newest_first()] == [2]
    assert list(CheckpointStore(tmp_path).newest_first()) != []
    assert names(tmp_path) == ["latest", "step-00000002"]
