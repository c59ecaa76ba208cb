"""Checkpoints on disk: each is complete or absent.

Owns names, atomicity, validity and retention. A checkpoint is written under a temporary name,
fsynced file by file and renamed: a crash at any point leaves the older ones intact. Then the link
`latest` moves to it, for people; a restart takes the newest valid checkpoint and ignores the link.
A checkpoint is also a model directory: it can be served, or trained from.

The history grows with the run, so it is not written again each time: checkpoints of one process
and lineage share one file through hard links, and each records its own length of the file. The
rest belongs to later checkpoints or to failed writes. So each directory is complete by itself.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge.core.errors import ConfigError, DataLoss, ResourceExhausted
from forge.runtime.files.sync import sync
from forge.runtime.telemetry import log
from services.trainer.checkpoint.files import PUBLISHED_FILE, STATE_FILE
from services.trainer.checkpoint.history import (
    MALFORMED,
    CheckpointHistory,
    Entry,
    Extent,
    extend,
    from_json,
)
from services.trainer.checkpoint.retention import CheckpointRetention

_PREFIX = "step-"
_UNFINISHED = ".unfinished"
_LATEST = "latest"
_HISTORY_FILE = "history.jsonl"
_FORMAT = 3
_EARLIER_FORMATS = (1, 2)
_FORMAT_WITH_HISTORY = 1
"""Format of earlier releases: the history is a list in the state."""
UNNAMED = "unnamed"
"""Lineage of checkpoints of earlier releases, which do not name it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint that is complete on disk."""

    path: Path
    step: int
    weight_version: int
    """Newest published version when the state was captured."""
    lineage: str = UNNAMED
    fence: int | None = None
    """Fence of the trainer that wrote it; None from an earlier release."""
    fingerprint: str = ""
    """Equal for copies, and only for them."""
    history: list[Entry]
    """Entries up to its step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Saved:
    """The history file of the newest checkpoint, which the next one extends."""

    history: CheckpointHistory
    file: Path
    extent: Extent


class CheckpointStore:
    """The checkpoints of one run, in one directory."""

    def __init__(self, directory: Path, retention: CheckpointRetention | None = None) -> None:
        self._directory = directory
        self._retention = retention or CheckpointRetention()
        self._saved: _Saved | None = None
        self._known: set[Path] = set()
        """Checkpoints that this process has saved, or found at a restore."""
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
        history: CheckpointHistory,
        lineage: str = UNNAMED,
        fence: int | None = None,
    ) -> Path:
        """Call `write` to fill a directory, which becomes the checkpoint of `step`.

        `history` is that of the step's lineage; it may contain later entries. A valid checkpoint
        of the same step is returned unchanged, unless a former trainer wrote it into a shared
        directory after this one had restored. Raises `ResourceExhausted` when it cannot be
        written, for example to a full disk; the attempt is removed.
        """
        path = path_of(self._directory, step)
        if self._has(path):
            return path
        # A new name for each attempt: a rank that has lost its trainer may still write.
        unfinished = path.with_name(f"{path.name}-{secrets.token_hex(4)}{_UNFINISHED}")
        try:
            unfinished.mkdir()
            write(unfinished)
            extent = self._write_history(unfinished / _HISTORY_FILE, history, step)
            _write_state(
                unfinished,
                step=step,
                weight_version=weight_version,
                lineage=lineage,
                fence=fence,
            )
            unfinished.rename(path)
            self._saved = _Saved(history=history, file=path / _HISTORY_FILE, extent=extent)
            sync(self._directory)
            self._point_to(path)
        except OSError as error:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise ResourceExhausted(f"checkpoint {path}: {error.strerror or error}") from error
        self._known.add(path)
        return path

    def oldest_step(self, *, recorded: int) -> int:
        """Step of the oldest checkpoint to which a rewind may return, damaged or not: one of the
        newest that retention keeps, or the `recorded` one. 0 if there is none."""
        steps = [step_of(path) for path in checkpoints_in(self._directory)]
        return min([*self._retention.newest(steps), *({recorded} & {*steps})], default=0)

    def prune(self, *, held: Collection[int]) -> None:
        """Remove the checkpoints that retention does not keep, except those of the steps `held`."""
        prune(self._directory, self._retention, held=held)

    def newest_first(self) -> Iterator[Checkpoint]:
        """Every valid checkpoint; a damaged one is logged and skipped.

        Raises `ConfigError` at a checkpoint of another format.
        """
        for path in reversed(checkpoints_in(self._directory)):
            try:
                checkpoint = read_checkpoint(path)
                self._known.add(path)
                yield checkpoint
            except DataLoss as error:
                log.error("checkpoint_damaged", path=str(path), error=str(error))

    def set_aside(self, checkpoint: Checkpoint) -> None:
        """Rename a checkpoint that cannot be loaded, and keep it for inspection."""
        set_aside(checkpoint.path)

    def _has(self, path: Path) -> bool:
        """Whether this process knows the checkpoint there; sets aside one that it does not know."""
        if not path.exists():
            return False
        with suppress(DataLoss):
            if read_checkpoint(path).path in self._known:
                return True
        set_aside(path)
        return False

    def _write_history(self, file: Path, history: CheckpointHistory, step: int) -> Extent:
        """Write the entries up to `step` that the last checkpoint's file does not have."""
        extent = Extent()
        if self._saved is not None and self._saved.history is history:
            # Some file systems have no hard links.
            with suppress(OSError):
                os.link(self._saved.file, file)
                extent = self._saved.extent
        return extend(file, extent, history.until(step, after=extent.entries))

    def _point_to(self, path: Path) -> None:
        """Move the link to a checkpoint that is durable."""
        link = self._directory / f"{_LATEST}-{secrets.token_hex(4)}{_UNFINISHED}"
        link.symlink_to(path.name)
        link.replace(self._directory / _LATEST)
        sync(self._directory)


def _write_state(directory: Path, **facts: int | str | None) -> None:
    """Complete an unfinished checkpoint: its `facts` and the size of each file, all durable."""
    written = sorted(directory.rglob("*"))
    files = {
        str(one.relative_to(directory)): one.stat().st_size for one in written if one.is_file()
    }
    state = directory / STATE_FILE
    state.write_text(json.dumps({"format": _FORMAT, **facts, "files": files}))
    for file in (*written, state, directory):
        sync(file)


def path_of(directory: Path, step: int) -> Path:
    """The directory of a step's checkpoint."""
    return directory / f"{_PREFIX}{step:08d}"


def checkpoints_in(directory: Path) -> list[Path]:
    """The checkpoints in a directory, damaged or not, the oldest first. Other names, such as an
    operator's copies, are none."""
    return sorted(one for one in directory.glob(f"{_PREFIX}*") if is_name(one.name))


def is_name(name: str) -> bool:
    """Whether a name is that of a checkpoint's directory."""
    return re.fullmatch(rf"{_PREFIX}[0-9]+", name) is not None


def set_aside(path: Path) -> None:
    """Rename a checkpoint that does not count, and keep it for inspection."""
    aside = path.with_name(path.name + ".damaged")
    shutil.rmtree(aside, ignore_errors=True)
    path.rename(aside)


def put_in_place(arrived: Path, path: Path) -> None:
    """Rename a complete directory, whose files are durable, to the checkpoint `path`; one that is
    there is set aside."""
    for folder in (*(one for one in arrived.rglob("*") if one.is_dir()), arrived):
        sync(folder)
    if path.exists():
        set_aside(path)
    arrived.rename(path)
    sync(path.parent)


def step_of(path: Path) -> int:
    """The step of a checkpoint's directory."""
    return int(path.name.removeprefix(_PREFIX))


def prune(directory: Path, retention: CheckpointRetention, *, held: Collection[int] = ()) -> None:
    """Remove the checkpoints that retention does not keep, except those of the steps `held`."""
    paths = {step_of(path): path for path in checkpoints_in(directory)}
    for step in sorted(paths.keys() - retention.kept(paths) - {*held}):
        # Renamed first: a half-removed directory must not look like a checkpoint. A new name: one
        # may be left of the same step, from before a rewind.
        doomed = paths[step].with_name(f"{paths[step].name}-{secrets.token_hex(4)}{_UNFINISHED}")
        paths[step].rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def fingerprint_of(path: Path) -> str:
    """Return the fingerprint of a complete checkpoint, from its state and the digest of its
    weights."""
    files = (path / STATE_FILE, path / PUBLISHED_FILE)
    return hashlib.sha256(b"".join(one.read_bytes() for one in files if one.exists())).hexdigest()


def read_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint in a directory. Raises `DataLoss` for a damaged one, `ConfigError` for one of
    another format."""
    try:
        state = json.loads((path / STATE_FILE).read_text())
        if state["format"] not in (*_EARLIER_FORMATS, _FORMAT):
            # Not damage: skipping it would silently train from the start.
            raise ConfigError(
                f"{path / STATE_FILE} is of format {state['format']!r}; "
                f"this trainer reads {', '.join(map(str, _EARLIER_FORMATS))} and {_FORMAT}"
            )
        for name, size in state["files"].items():
            found = (path / name).stat().st_size
            # A later checkpoint may have extended the history.
            if found < size or (found > size and name != _HISTORY_FILE):
                raise DataLoss(f"{name} has {found} bytes, not {size}")
        return Checkpoint(
            path=path,
            step=state["step"],
            weight_version=state["weight_version"],
            lineage=state.get("lineage", UNNAMED),
            fence=state.get("fence"),
            fingerprint=fingerprint_of(path),
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
