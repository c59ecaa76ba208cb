"""One checkpoint that all ranks write: each its part, beside training.

Owns the agreement between the ranks, through the store of their group. Rank 0 names the directory
once it exists; the writer process of each other rank writes its part, and a thread reports the
files once they are durable. No rank waits in a collective, so training continues. A rank that is
lost meanwhile costs this checkpoint alone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from torch.distributed import Store  # type: ignore[attr-defined]

from services.trainer.checkpoint.files import Contents
from services.trainer.checkpoint.writer import WrittenFile

_LOOK_S = 0.05
_VISIBLE_S = 120.0
"""Longest time until a file that another host has written is seen in a shared directory."""


class _Report(msgspec.Struct, frozen=True, kw_only=True):
    """The end of one rank's part."""

    files: list[WrittenFile] = []
    error: str = ""


class SharedSave:
    """Rank 0's end of one save."""

    def __init__(self, store: Store, *, number: int, ranks: int, lost: Callable[[], str]) -> None:
        """`lost` returns why a rank will not report, or ""."""
        self.number = number
        self._store = store
        self._reports = [_report_key(number, rank) for rank in range(1, ranks)]
        self._lost = lost
        self._directory = Path()

    def begin(self, directory: Path) -> None:
        """Let each rank write into `directory`."""
        self._directory = directory.absolute()
        self._store.set(_directory_key(self.number), str(self._directory))

    def written(self) -> list[WrittenFile]:
        """Wait for the files of the other ranks. Raises `OSError` when one could not write, or is
        lost."""
        while not self._store.check(self._reports):
            if because := self._lost():
                raise OSError(0, because)
            time.sleep(_LOOK_S)
        reports = [msgspec.json.decode(self._store.get(key), type=_Report) for key in self._reports]
        for key in (*self._reports, _directory_key(self.number)):
            self._store.delete_key(key)
        if errors := [one.error for one in reports if one.error]:
            raise OSError(0, errors[0])
        files = [file for one in reports for file in one.files]
        for file in files:
            self._await(file)
        return files

    def _await(self, file: WrittenFile) -> None:
        """Wait until this host sees what another one has written."""
        give_up_s = time.monotonic() + _VISIBLE_S
        path = self._directory / file.name
        while not path.exists() or path.stat().st_size != file.size_bytes:
            if time.monotonic() > give_up_s:
                raise OSError(
                    0, f"{file.name} of another rank is not here: checkpoint.dir must be shared"
                )
            time.sleep(_LOOK_S)


class PartWriter:
    """Another rank's end: has its part of each save written."""

    def __init__(self, store: Store, *, rank: int) -> None:
        self._store = store
        self._rank = rank
        self._newest = 0

    def start(self, contents: Contents, *, number: int) -> None:
        """Write `contents` once rank 0 has named the directory of this save; an earlier one that it
        has not begun is given up."""
        self._newest = number
        threading.Thread(target=self._write, args=(contents, number), daemon=True).start()

    def _write(self, contents: Contents, number: int) -> None:
        while not self._store.check([_directory_key(number)]):
            if number != self._newest:
                return
            time.sleep(_LOOK_S)
        directory = Path(self._store.get(_directory_key(number)).decode())
        try:
            report = _Report(files=contents.write_part(directory))
        except Exception as error:  # without a report rank 0 would wait forever
            said = isinstance(error, OSError) and error.strerror
            report = _Report(
                error=f"rank {self._rank}: {said or f'{type(error).__name__}: {error}'}"
            )
        self._store.set(_report_key(number, self._rank), msgspec.json.encode(report).decode())


def _directory_key(number: int) -> str:
    return f"save/{number}"


def _report_key(number: int, rank: int) -> str:
    return f"saved/{number}/{rank}"
