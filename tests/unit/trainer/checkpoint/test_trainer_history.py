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
from services.trainer.checkpoint.history import Entry, History
from services.trainer.checkpoint.store import CheckpointStore
from services.trainer.reporting.run_record import TrainingRecord
from tests.support.runtime.disks import full_beyond


def taken(step: int, *, loss: float = 0.0) -> pb.StepMetrics:
    return pb.StepMetrics(step=step, loss=loss)


def save(store: CheckpointStore, history: History, step: int) -> Path:
    return store.save(lambda _: None, step=step, weight_version=1, history=history)


def histories(directory: Path) -> dict[int, list[Entry]]:
    """Of each checkpoint there."""
    return {one.step: one.history for one in CheckpointStore(directory).newest_first()}


def lines(checkpoint: Path) -> int:
    return len((checkpoint / "history.jsonl").read_text().splitlines())


def test_a_checkpoint_writes_what_was_told_since_the_last(tmp_path: Path) -> None:
    """They share a file; each knows what of it is its own. What is told while it is written, of
    steps that it does not cover, is not."""
    store, history = CheckpointStore(tmp_path), History([taken(1), pb.Evaluation(step=1)])
    first = save(store, history, 1)
    for entry in (taken(2), pb.Evaluation(step=2), taken(3)):
        history.add(entry)
    second = save(store, history, 2)
    assert (first / "history.jsonl").samefile(second / "history.jsonl") and lines(first) == 4
    assert histories(tmp_path) == {1: history.until(1), 2: history.until(2)}
    assert len(history.until(2)) == 4


def test_a_checkpoint_copied_elsewhere_is_whole(tmp_path: Path) -> None:
    """However much was added to the history since, and whatever became of where it was."""
    store, history = CheckpointStore(tmp_path / "here"), History([taken(1)])
    first = save(store, history, 1)
    history.add(taken(2))
    save(store, history, 2)
    shutil.copytree(first, tmp_path / "there" / first.name)
    shutil.rmtree(tmp_path / "here")
    assert histories(tmp_path / "there") == {1: [taken(1)]}


def test_an_attempt_that_failed_leaves_nothing_in_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it had added is cut off, and added again."""
    store, history = CheckpointStore(tmp_path), History([taken(1)])
    save(store, history, 1)
    history.add(taken(2))
    with monkeypatch.context() as patched, pytest.raises(ResourceExhausted):
        patched.setattr(Path, "rename", refuse)
        save(store, history, 2)
    history.add(taken(3))
    assert lines(save(store, history, 3)) == 3
    assert histories(tmp_path) == {1: history.until(1), 3: history.until(3)}


def test_one_that_is_there_keeps_its_history_whatever_fails_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The link `latest` could not be moved to it, and the next attempt meets a full disk."""
    store, history = CheckpointStore(tmp_path), History([taken(1)])
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


def test_steps_taken_again_are_not_added_to_those_they_replace(tmp_path: Path) -> None:
    """What goes on from a checkpoint has a file of its own: nobody else's is touched."""
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


def test_without_hard_links_it_is_written_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not every file system has them."""
    monkeypatch.setattr(os, "link", refuse)
    store, history = CheckpointStore(tmp_path), History([taken(1)])
    first = save(store, history, 1)
    history.add(taken(2))
    second = save(store, history, 2)
    assert (lines(first), lines(second)) == (1, 2)
    assert histories(tmp_path) == {1: history.until(1), 2: history.until(2)}


def test_a_checkpoint_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    """It had the history in its state. One of a later version may have measured what this one
    does not know."""
    record = TrainingRecord(max_steps=9, metrics_file="")
    path = save(CheckpointStore(tmp_path), record.history, 1)
    (path / "history.jsonl").unlink()
    state = json.loads((path / "state.json").read_text())
    entries = [{"step": 1, "loss": 0.5, "unheard_of": 3}, {"evaluation": {"step": 1}}]
    state |= {"format": 1, "files": {}, "history": entries}
    (path / "state.json").write_text(json.dumps(state))
    assert histories(tmp_path) == {1: [taken(1, loss=0.5), pb.Evaluation(step=1)]}
