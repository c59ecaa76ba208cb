"""The changes of the files that units of a host read: the contents at the start of each unit.

`forge deploy install` notes them. A file that was changed and restored since a unit started has the
content that the unit read: a rollback makes no unit stale. Not here: files of the host (`host`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import msgspec

from forge.cli.deploy.host.file_errors import file_error
from forge.cli.deploy.render.rendered import UnitEntry
from forge.runtime.files.private import replace_private_file

MOST_CHANGES = 32
"""Most recorded changes of one file. A unit that runs since before the oldest one is compared by
the file's time."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class FileVersion:
    """One content of a file."""

    unix_s: float
    """Time of the file's modification; of a removal, the time at which it was found."""
    digest: str
    """Empty: the file was removed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileHistory:
    """The contents that the files of one host had."""

    files: Mapping[str, tuple[FileVersion, ...]] = field(default_factory=dict)
    """By path, oldest first."""
    inputs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By unit: the files that it has read since it is in the inventory."""

    def noted(
        self, units: Iterable[UnitEntry], present: Mapping[str, FileVersion], *, now_unix_s: float
    ) -> FileHistory:
        """Return these changes with the present contents, and the inputs of the present units."""
        inputs = {
            unit.name: tuple(sorted({*self.inputs.get(unit.name, ()), *unit.inputs}))
            for unit in units
        }
        files = {}
        for path in sorted({*present, *(one for paths in inputs.values() for one in paths)}):
            known = self.files.get(path, ())
            found = present.get(path)
            if found is None and known:
                found = FileVersion(unix_s=now_unix_s, digest="")
            if found is not None and (not known or known[-1].digest != found.digest):
                known = (*known, found)
            if known:
                files[path] = known[-MOST_CHANGES:]
        return FileHistory(files=files, inputs=inputs)

    def differs(self, path: str, present: FileVersion | None, *, since_unix_s: float) -> bool:
        """Return whether a file now differs from its content at a time.

        A change that was not noted, by hand, counts as a difference. An absent file that was never
        noted does not.
        """
        known = self.files.get(path, ())
        at = _digest_at(known, since_unix_s)
        if present is None:
            return bool(at)
        if present.unix_s <= since_unix_s:
            return False
        return at != present.digest or known[-1] != present


def _digest_at(known: tuple[FileVersion, ...], unix_s: float) -> str | None:
    """The content at a time; None if it is not known."""
    for one, later in pairwise((*known, FileVersion(unix_s=float("inf"), digest=""))):
        if one.unix_s <= unix_s < later.unix_s:
            return one.digest
    return None


def read_file_history(file: Path) -> FileHistory:
    """Return the noted changes of a host; none without the file, or with a damaged one."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=FileHistory)
    except (FileNotFoundError, msgspec.MsgspecError):
        # Without them a unit is compared by the times of its files.
        return FileHistory()
    except OSError as error:
        raise file_error(error, file) from None


def write_file_history(file: Path, changes: FileHistory) -> None:
    """Replace the noted changes of a host. Raises `InvalidArgument`."""
    try:
        replace_private_file(file, msgspec.json.encode(changes).decode() + "\n")
    except OSError as error:
        raise file_error(error, file) from None
