"""Copies of checkpoints at a URL of fsspec: an object store, or another file system.

Owns the layout there: one folder a checkpoint, with the files of its directory. An object store has
no rename, so the state file makes a copy count: it is sent after all others, and removed before
them. Credentials and endpoints are those of the file system's own package.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import msgspec
from fsspec.core import url_to_fs

from forge.core.errors import ConfigError, DataLoss, Unavailable
from forge.runtime.files.sync import sync
from forge.runtime.telemetry import log
from services.trainer.checkpoint.files import STATE_FILE
from services.trainer.checkpoint.retention import CheckpointRetention
from services.trainer.checkpoint.store import (
    UNNAMED,
    checkpoints_in,
    is_name,
    path_of,
    prune,
    put_in_place,
    read_checkpoint,
    step_of,
)

_ARRIVING = "copied-"


class _State(msgspec.Struct, frozen=True, kw_only=True):
    """The state file of a checkpoint, as far as its copies need it."""

    lineage: str = UNNAMED
    fence: int | None = None
    """None from an earlier release."""
    files: dict[str, int]
    """Size of each file."""

    @property
    def age(self) -> int:
        """Orders copies: fences only rise."""
        return self.fence or 0

    @classmethod
    def of(cls, checkpoint: Path) -> _State:
        """Raises `msgspec.MsgspecError` and `OSError`."""
        return msgspec.json.decode((checkpoint / STATE_FILE).read_bytes(), type=cls)


class RemoteCopies:
    """The copies of one run's checkpoints."""

    def __init__(self, url: str, retention: CheckpointRetention) -> None:
        """Raises `ConfigError` for a URL that is not supported here: its package is missing."""
        self._url = url
        self._retention = retention
        try:
            self._files: Any
            self._files, self._root = url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise ConfigError(f"checkpoint.copy_to = {url!r}: {error}") from error

    def put(self, checkpoint: Path) -> None:
        """Copy a checkpoint, and remove the copies of its lineage that retention does not keep, and
        those of later steps that a rewind has undone. Copies of other lineages stay.

        Raises `Unavailable`; the former copies stay.
        """
        try:
            names = sorted(
                str(file.relative_to(checkpoint))
                for file in checkpoint.rglob("*")
                if file.is_file() and file.name != STATE_FILE
            )
            # A rewind may repeat the step: the earlier copy must not count meanwhile.
            self._remove(self._place(checkpoint.name))
            for name in (*names, STATE_FILE):
                target = self._place(f"{checkpoint.name}/{name}")
                self._files.makedirs(target.rpartition("/")[0], exist_ok=True)
                self._files.put_file(str(checkpoint / name), target)
            for folder in self._outdated(step_of(checkpoint), _State.of(checkpoint)):
                self._remove(folder)
        except Exception as error:  # each file system has its own errors
            raise Unavailable(f"{self._url}: {type(error).__name__}: {error}") from error

    def _outdated(self, step: int, state: _State) -> list[str]:
        """The copies that the copy of a step replaces."""
        copies = {each: one for each, one in self._states().items() if one.lineage == state.lineage}
        kept = self._retention.kept([each for each in copies if each <= step])
        # A former trainer may end its copy late: those of its successor have a higher fence.
        kept |= {each for each, one in copies.items() if each > step and one.age > state.age}
        return [self._folder(each) for each in copies.keys() - kept]

    def steps(self) -> list[int]:
        """The steps of the copies that are complete, the oldest first. Raises the file system's
        errors."""
        return sorted(self._states())

    def _states(self) -> dict[int, _State]:
        self._files.invalidate_cache()
        names: list[str] = self._files.glob(self._place(f"step-*/{STATE_FILE}"))
        found: dict[str, bytes] = self._files.cat(names, on_error="omit") if names else {}
        states: dict[int, _State] = {}
        for name, data in found.items():
            folder = name.rpartition("/")[0]
            if not is_name(Path(folder).name):
                continue
            try:
                states[step_of(Path(folder))] = msgspec.json.decode(data, type=_State)
            except msgspec.MsgspecError as error:  # a file system may store a part of a file
                log.error("checkpoint_copy_damaged", copy=folder, error=str(error))
        return states

    def _folder(self, step: int) -> str:
        return self._place(path_of(Path(), step).name)

    def _place(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"

    def _remove(self, folder: str) -> None:
        for name in (f"{folder}/{STATE_FILE}", folder):
            if self._files.exists(name):
                self._files.rm(name, recursive=True)

    def fetch_newer(self, directory: Path, *, lineage: str, after: int) -> int:
        """Fetch the newest copy of a lineage, "" for the newest lineage, of a later step than
        `after`; return its step, or 0 if there is none. A damaged copy is passed over.

        Raises `Unavailable`.
        """
        directory.mkdir(parents=True, exist_ok=True)
        for leftover in directory.glob(f"{_ARRIVING}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        try:
            copies = self._states()
            # A new lineage begins at step 0.
            for step in sorted(copies, key=lambda each: (copies[each].age, each), reverse=True):
                state = copies[step]
                wanted = step > after and lineage in ("", state.lineage)
                if wanted and self._fetched(self._folder(step), state, path_of(directory, step)):
                    prune(directory, self._retention)
                    return step
        except Exception as error:  # each file system has its own errors
            raise Unavailable(f"{self._url}: {type(error).__name__}: {error}") from error
        return 0

    def _fetched(self, folder: str, state: _State, path: Path) -> bool:
        arriving = path.with_name(_ARRIVING + path.name)
        try:
            for name in (*state.files, STATE_FILE):
                target = arriving / name
                if not target.resolve().is_relative_to(arriving.resolve()):
                    raise ConfigError(f"{name!r} is not a path in a checkpoint")
                target.parent.mkdir(parents=True, exist_ok=True)
                self._files.get_file(f"{folder}/{name}", str(target))
                sync(target)
            read_checkpoint(arriving)
        except (DataLoss, FileNotFoundError) as error:
            log.error("checkpoint_copy_damaged", copy=folder, error=str(error))
            shutil.rmtree(arriving)
            return False
        put_in_place(arriving, path)
        return True


def newest_step(directory: Path) -> int:
    """Step of the newest checkpoint in a directory, damaged or not; 0 if there is none."""
    return max(map(step_of, checkpoints_in(directory)), default=0)
