"""Checkpoints on disk: whole or not there.

Owns names, atomicity, validity and retention. A checkpoint is written under a temporary name,
fsynced file by file, and renamed: a crash at any point leaves the older ones as they were. Then
the link `latest` moves to it, for people: a restart goes by what is valid, not by the link. A
checkpoint is also a model directory, so that it can be served or trained from like any other.

The history grows with the run, so it is not written again each time: checkpoints of one process
and lineage share one file of it, by hard links, and each knows how far that file is its own. What
is beyond is of later ones, or of an attempt that failed. So each directory is whole by itself.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge.core.errors import ConfigError, DataLoss, ResourceExhausted
from forge.runtime.telemetry import log
from services.trainer.checkpoint.files import STATE_FILE
from services.trainer.checkpoint.history import MALFORMED, Entry, Extent, History, extend, from_json

KEPT = 2
_PREFIX = "step-"
_UNFINISHED = ".unfinished"
_LATEST = "latest"
_HISTORY_FILE = "history.jsonl"
_FORMAT = 2
_FORMAT_WITH_HISTORY = 1
"""Had it in the state, as a list."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """One that is complete on disk."""

    path: Path
    step: int
    weight_version: int
    """Newest version published when it was taken."""
    history: list[Entry]
    """Of every step up to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Saved:
    """What the next checkpoint goes on from."""

    history: History
    file: Path
    extent: Extent


class CheckpointStore:
    """The checkpoints of one run, in one directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._saved: _Saved | None = None
        directory.mkdir(parents=True, exist_ok=True)
        for leftover in directory.glob(f"*{_UNFINISHED}"):
            if leftover.is_symlink():
                leftover.unlink()
            else:
                shutil.rmtree(leftover)

    def save(
        self,
        write: Callable[[Path], None],
        *,
        step: int,
        weight_version: int,
        history: History,
    ) -> Path:
        """Have `write` fill a directory, and keep it as the checkpoint of `step`.

        `history` is that of the step's lineage, and may have gone on meanwhile. The same
        step again returns what is there. Raises `ResourceExhausted` when it cannot be written, most
        often to a full disk; nothing is left of the attempt then.
        """
        path = self._directory / f"{_PREFIX}{step:08d}"
        if path.exists():
            try:
                return _read(path).path
            except DataLoss:
                self._set_aside(path)
        unfinished = path.with_name(path.name + _UNFINISHED)
        try:
            unfinished.mkdir()
            write(unfinished)
            extent = self._write_history(unfinished / _HISTORY_FILE, history, step)
            written = sorted(unfinished.rglob("*"))
            files = {
                str(file.relative_to(unfinished)): file.stat().st_size
                for file in written
                if file.is_file()
            }
            state = {
                "format": _FORMAT,
                "step": step,
                "weight_version": weight_version,
                "files": files,
            }
            (unfinished / STATE_FILE).write_text(json.dumps(state))
            for file in (*written, unfinished / STATE_FILE, unfinished):
                _fsync(file)
            unfinished.rename(path)
            self._saved = _Saved(history=history, file=path / _HISTORY_FILE, extent=extent)
            _fsync(self._directory)
            self._point_to(path)
        except OSError as error:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise ResourceExhausted(f"checkpoint {path}: {error.strerror or error}") from error
        self._prune()
        return path

    def oldest_step(self) -> int:
        """Of those kept, damaged or not: nothing earlier can be gone back to. 0 without any."""
        paths = self._directory.glob(f"{_PREFIX}*[0-9]")
        return min((int(path.name.removeprefix(_PREFIX)) for path in paths), default=0)

    def newest_first(self) -> Iterator[Checkpoint]:
        """Every valid checkpoint; one that is damaged is told about and passed over.

        Raises `ConfigError` at one of another format.
        """
        for path in sorted(self._directory.glob(f"{_PREFIX}*[0-9]"), reverse=True):
            try:
                yield _read(path)
            except DataLoss as error:
                log.error("checkpoint_damaged", path=str(path), error=str(error))

    def set_aside(self, checkpoint: Checkpoint) -> None:
        """Keep one that cannot be loaded for whoever looks into it, and out of the way."""
        self._set_aside(checkpoint.path)

    def _set_aside(self, path: Path) -> None:
        aside = path.with_name(path.name + ".damaged")
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)

    def _write_history(self, file: Path, history: History, step: int) -> Extent:
        """All up to `step`, of which only what the last checkpoint has not is written."""
        extent = Extent()
        if self._saved is not None and self._saved.history is history:
            # Not every file system has links.
            with suppress(OSError):
                os.link(self._saved.file, file)
                extent = self._saved.extent
        return extend(file, extent, history.until(step, after=extent.entries))

    def _point_to(self, path: Path) -> None:
        """Only ever to one that is durable."""
        link = self._directory / (_LATEST + _UNFINISHED)
        link.symlink_to(path.name)
        link.replace(self._directory / _LATEST)
        _fsync(self._directory)

    def _prune(self) -> None:
        for path in sorted(self._directory.glob(f"{_PREFIX}*[0-9]"))[:-KEPT]:
            # Gone from view at once: a half-removed directory must not look like a checkpoint.
            doomed = path.with_name(path.name + _UNFINISHED)
            path.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)


def _read(path: Path) -> Checkpoint:
    try:
        state = json.loads((path / STATE_FILE).read_text())
        if state["format"] not in (_FORMAT, _FORMAT_WITH_HISTORY):
            # Not damage: to pass it over would be to train from the start, unasked.
            raise ConfigError(
                f"{path / STATE_FILE} is of format {state['format']!r}; "
                f"this trainer reads {_FORMAT_WITH_HISTORY} and {_FORMAT}"
            )
        for name, size in state["files"].items():
            found = (path / name).stat().st_size
            # A later checkpoint may have added to the history.
            if found < size or (found > size and name != _HISTORY_FILE):
                raise DataLoss(f"{name} has {found} bytes, not {size}")
        return Checkpoint(
            path=path,
            step=state["step"],
            weight_version=state["weight_version"],
            history=[from_json(fields) for fields in _history(path, state)],
        )
    except (OSError, KeyError, *MALFORMED) as error:
        raise DataLoss(f"{type(error).__name__}: {error}") from error


def _history(path: Path, state: dict[str, Any]) -> list[dict[str, Any]]:
    if state["format"] == _FORMAT_WITH_HISTORY:
        history: list[dict[str, Any]] = state["history"]
        return history
    with (path / _HISTORY_FILE).open("rb") as file:
        return [json.loads(line) for line in file.read(state["files"][_HISTORY_FILE]).splitlines()]


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
