"""The history of a run in its checkpoints: in each of them whole, and written once."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from forge.core.errors import ResourceExhausted
from forge.v1 import trainer_pb2 as pb
from services.trainer.checkpoint.history import CheckpointHistory, Entry
from services.trainer.checkpoint.store import CheckpointStore
from services.trainer.reporting.run_record import TrainingRecord
from tests.support.runtime.disks import full_beyond


def taken(step: int, *, loss: float = 0.0) -> pb.StepMetrics:
    return pb.StepMetrics(step=step, loss=loss)


def save(store: CheckpointStore, history: CheckpointHistory, step: int) -> Path:
    return store.save(lambda _: None, step=step, weight_version=1, history=history)


def histories(directory: Path) -> dict[int, list[Entry]]:
    """Of each checkpoint there."""
    return {one.step: one.history for one in CheckpointStore(directory).newest_first()}


def lines(checkpoint: Path) -> int:
    return len((checkpoint / "history.jsonl").read_text().splitlines())


def test_checkpoint_writes_the_history_since_the_last_one(tmp_path: Path) -> None:
    """They share a file; each knows its own part. Entries added during the write, of steps that it
    does not cover, are not included."""
    store, history = CheckpointStore(tmp_path), CheckpointHistory([taken(1), pb.Evaluation(step=1)])
    first = save(store, history, 1)
    for entry in (taken(2), pb.Evaluation(step=2), taken(3)):
        history.add(entry)
    second = save(store, history, 2)
    assert (first / "history.jsonl").samefile(second / "history.jsonl") and lines(first) == 4
    assert histories(tmp_path) == {1: history.until(1), 2: history.until(2)}
    assert len(history.until(2)) == 4


def test_copied_checkpoint_has_its_whole_history(tmp_path: Path) -> None:
    """For any later additions, and if its source is deleted."""
    store, history = CheckpointStore(tmp_path / "here"), CheckpointHistory([taken(1)])
    first = save(store, history, 1)
    history.add(taken(2))
    save(store, history, 2)
    shutil.copytree(first, tmp_path / "there" / first.name)
    shutil.rmtree(tmp_path / "here")
    assert histories(tmp_path / "there") == {1: [taken(1)]}


def test_failed_save_leaves_nothing_in_the_next_history(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its additions are cut off, and added again."""
    store, history = CheckpointStore(tmp_path), CheckpointHistory([taken(1)])
    save(store, history, 1)
    history.add(taken(2))
    with monkeypatch.context() as patched, pytest.raises(ResourceExhausted):
        patched.setattr(Path, "rename", refuse)
        save(store, history, 2)
    history.add(taken(3))
    assert lines(save(store, history, 3)) == 3
    assert histories(tmp_path) == {1: history.until(1), 3: history.until(3)}


def test_complete_checkpoint_keeps_its_history_after_later_failures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The link `latest` could not be moved to it, and the next save meets a full disk."""
    store, history = CheckpointStore(tmp_path), CheckpointHistory([taken(1)])
    first = save(store, history, 1)
    size = (first / "history.jsonl").stat().st_size
    history.add(taken(2))
    with monkeypatch.context() as patched, pytest.raises(ResourceExhausted):
        patched.setattr(Path, "symlink_to", refuse)
        save(store, history, 2)
    history.add(taken(3))
    with full_beyond(size + 10), pytest.raises(ResourceExhausted):
        save(store, history, 3)
    assert histories(tmp_path) == {1: history.until(1), 2: history.until(2)}


def refuse(*_: Any) -> None:
    raise OSError(28, "No space left on device")


def test_repeated_steps_are_not_added_to_the_replaced_ones(tmp_path: Path) -> None:
    """A run from a checkpoint has its own file: no other's is changed."""
    record = TrainingRecord(max_steps=9, metrics_file="")
    store = CheckpointStore(tmp_path)
    record.append(taken(1))
    save(store, record.history, 1)
    record.append(taken(2))
    shutil.copytree(save(store, record.history, 2), tmp_path / "step-00000002.damaged")
    (tmp_path / "step-00000002" / "history.jsonl").unlink()
    record.rewind(histories(tmp_path)[1])
    for step in (2, 3):
        record.append(taken(step, loss=0.5))
    save(store, record.history, 3)
    assert histories(tmp_path)[3] == [taken(1), taken(2, loss=0.5), taken(3, loss=0.5)]
    assert lines(tmp_path / "step-00000002.damaged") == 2


def test_history_is_written_whole_without_hard_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not every file system has them."""
    monkeypatch.setattr(os, "link", refuse)
    store, history = CheckpointStore(tmp_path), CheckpointHistory([taken(1)])
    first = save(store, history, 1)
    history.add(taken(2))
    second = save(store, history, 2)
    assert (lines(first), lines(second)) == (1, 2)
    assert histories(tmp_path) == {1: history.until(1), 2: history.until(2)}


def test_checkpoint_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    """It has the history in its state. One of a later version may have unknown metrics."""
    record = TrainingRecord(max_steps=9, metrics_file="")
    path = save(CheckpointStore(tmp_path), record.history, 1)
    (path / "history.jsonl").unlink()
    state = json.loads((path / "state.json").read_text())
    entries = [{"step": 1, "loss": 0.5, "unheard_of": 3}, {"evaluation": {"step": 1}}]
    state |= {"format": 1, "files": {}, "history": entries}
    (path / "state.json").write_text(json.dumps(state))
    assert histories(tmp_path) == {1: [taken(1, loss=0.5), pb.Evaluation(step=1)]}
