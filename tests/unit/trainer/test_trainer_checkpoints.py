"""Checkpoints are whole or not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from forge.core.errors import ResourceExhausted
from services.trainer.checkpoints import CheckpointStore


def save(store: CheckpointStore, step: int, content: bytes = b"weights") -> Path:
    return store.save(
        lambda directory: write(directory, content),
        step=step,
        weight_version=step + 10,
        history=[{"step": step}],
    )


def write(directory: Path, content: bytes) -> None:
    (directory / "model.bin").write_bytes(content)


def test_what_was_saved_is_found_again(tmp_path: Path) -> None:
    """A new process sees the newest first, with all that goes with it."""
    store = CheckpointStore(tmp_path)
    for step in (2, 4):
        save(store, step)
    found = list(CheckpointStore(tmp_path).newest_first())
    assert [(one.step, one.weight_version, one.history) for one in found] == [
        (4, 14, [{"step": 4}]),
        (2, 12, [{"step": 2}]),
    ]
    assert (found[0].path / "model.bin").read_bytes() == b"weights"


def test_two_are_kept(tmp_path: Path) -> None:
    """Older ones go, in the order of their steps, not of their names' length."""
    store = CheckpointStore(tmp_path)
    for step in (8, 9, 10):
        save(store, step)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000009", "step-00000010"]


def test_the_same_step_is_saved_once(tmp_path: Path) -> None:
    """Asking again changes nothing on disk."""
    store = CheckpointStore(tmp_path)
    assert save(store, 1) == save(store, 1, b"other")
    (found,) = store.newest_first()
    assert (found.path / "model.bin").read_bytes() == b"weights"


def test_a_crash_while_writing_leaves_the_older_ones(tmp_path: Path) -> None:
    """A half-written directory is no checkpoint, and the next start removes it."""
    store = CheckpointStore(tmp_path)
    save(store, 1)

    def crash(directory: Path) -> None:
        write(directory, b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.save(crash, step=2, weight_version=12, history=[])
    again = CheckpointStore(tmp_path)
    assert [one.step for one in again.newest_first()] == [1]
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_a_full_disk_is_told_and_nothing_is_left(tmp_path: Path) -> None:
    """The error says so, and names the checkpoint."""
    store = CheckpointStore(tmp_path)

    def full(directory: Path) -> None:
        write(directory, b"some")
        raise OSError(28, "No space left on device")

    with pytest.raises(ResourceExhausted, match="step-00000001: No space left"):
        store.save(full, step=1, weight_version=1, history=[])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", ["short", "missing", "state", "format"])
def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path, damage: str) -> None:
    """Whatever is wrong with the newest, the older one is there."""
    store = CheckpointStore(tmp_path)
    save(store, 1)
    newest = save(store, 2)
    match damage:
        case "short":
            (newest / "model.bin").write_bytes(b"w")
        case "missing":
            (newest / "model.bin").unlink()
        case "state":
            (newest / "state.json").write_text("{")
        case "format":
            state = (newest / "state.json").read_text()
            (newest / "state.json").write_text(state.replace('"format": 1', '"format": 9'))
    assert [one.step for one in store.newest_first()] == [1]


def test_one_set_aside_is_kept_and_not_found(tmp_path: Path) -> None:
    """Its step can be saved again, and its files are there to be looked into."""
    store = CheckpointStore(tmp_path)
    save(store, 1)
    (found,) = store.newest_first()
    store.set_aside(found)
    assert list(store.newest_first()) == []
    save(store, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step-00000001",
        "step-00000001.damaged",
    ]
