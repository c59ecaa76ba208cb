"""Copies of checkpoints at a URL of fsspec: an object store, or another file system.

Owns the layout there: one folder a checkpoint, with the files of its directory. An object store has
no rename, so the state file makes a copy count: it is sent after all others, and removed before
them. Credentials and endpoints are those of the file system's own package.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs

from forge.core.errors import ConfigError, DataLoss, Unavailable
from forge.runtime.telemetry import log
from services.trainer.checkpoint.files import STATE_FILE, sync
from services.trainer.checkpoint.retention import Retention
from services.trainer.checkpoint.store import (
    UNNAMED,
    checkpoints_in,
    path_of,
    prune,
    read_checkpoint,
    set_aside,
    step_of,
)

_ARRIVING = "copied-"


class RemoteCopies:
    """The copies of one run's checkpoints."""

    def __init__(self, url: str, retention: Retention) -> None:
        """Raises `ConfigError` for a URL that is not supported here: its package is missing."""
        self._url = url
        self._retention = retention
        try:
            self._files: Any
            self._files, self._root = url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise ConfigError(f"checkpoint.copy_to = {url!r}: {error}") from error

    def put(self, checkpoint: Path) -> None:
        """Copy a checkpoint, and remove the copies that retention does not keep.

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
            steps = self.steps()
            for step in steps.keys() - self._retention.kept(steps):
                self._remove(steps[step])
        except Exception as error:  # each file system has its own errors
            raise Unavailable(f"{self._url}: {type(error).__name__}: {error}") from error

    def steps(self) -> dict[int, str]:
        """The copies that are complete, by step. Raises the file system's errors."""
        self._files.invalidate_cache()
        found: list[str] = self._files.glob(self._place(f"step-*/{STATE_FILE}"))
        folders = [name.rpartition("/")[0] for name in found]
        return {step_of(Path(folder)): folder for folder in folders}

    def _place(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"

    def _remove(self, folder: str) -> None:
        for name in (f"{folder}/{STATE_FILE}", folder):
            if self._files.exists(name):
                self._files.rm(name, recursive=True)

    def fetch_newer(self, directory: Path, *, lineage: str, after: int) -> int:
        """Fetch the newest copy of a lineage, "" for any, of a later step than `after`; return its
        step, or 0 if there is none. A damaged copy is passed over.

        Raises `Unavailable`.
        """
        directory.mkdir(parents=True, exist_ok=True)
        for leftover in directory.glob(f"{_ARRIVING}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        try:
            steps = self.steps()
            for step in sorted(steps, reverse=True):
                if step <= after:
                    break
                state = json.loads(self._files.cat_file(f"{steps[step]}/{STATE_FILE}"))
                wanted = lineage in ("", state.get("lineage", UNNAMED))
                if wanted and self._fetched(steps[step], state, path_of(directory, step)):
                    prune(directory, self._retention)
                    return step
        except Exception as error:  # each file system has its own errors
            raise Unavailable(f"{self._url}: {type(error).__name__}: {error}") from error
        return 0

    def _fetched(self, folder: str, state: dict[str, Any], path: Path) -> bool:
        arriving = path.with_name(_ARRIVING + path.name)
        for name in (*state["files"], STATE_FILE):
            target = arriving / name
            if not target.resolve().is_relative_to(arriving.resolve()):
                raise DataLoss(f"{name!r} is not a path in a checkpoint")
            target.parent.mkdir(parents=True, exist_ok=True)
            self._files.get_file(f"{folder}/{name}", str(target))
            sync(target)
        try:
            read_checkpoint(arriving)
        except DataLoss as error:
            log.error("checkpoint_copy_damaged", copy=folder, error=str(error))
            shutil.rmtree(arriving)
            return False
        for each in (*(one for one in arriving.rglob("*") if one.is_dir()), arriving):
            sync(each)
        if path.exists():
            set_aside(path)
        arriving.rename(path)
        sync(path.parent)
        return True


def newest_step(directory: Path) -> int:
    """Step of the newest checkpoint in a directory, damaged or not; 0 if there is none."""
    return max(map(step_of, checkpoints_in(directory)), default=0)
