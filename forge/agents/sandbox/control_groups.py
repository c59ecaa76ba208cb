"""Control groups of sandboxes: limits that hold for all processes of one sandbox together.

Owns the part of the hierarchy (version 2) that systemd delegates to the runner (`Delegate=yes`), or
that its user owns. The runner moves itself into a leaf; each sandbox has a leaf of its own. Without
delegation there are no groups, and resource limits (rlimits) bound each process.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from forge.core.errors import FailedPrecondition
from forge.runtime.telemetry import log

_CONTROLLERS: Final = ("memory", "pids")
_RUNNER: Final = "runner"
_SANDBOX: Final = "sandbox-"
# The shell joins the group before it becomes the sandbox, so no process is ever outside.
_JOIN: Final = 'echo 0 > "$0" && exec "$@"'


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlGroup:
    """The group of one sandbox; without a directory it limits nothing."""

    directory: Path | None = None

    @property
    def words(self) -> tuple[str, ...]:
        """Words before a command line, which start it in the group."""
        if self.directory is None:
            return ()
        return ("/bin/sh", "-c", _JOIN, str(self.directory / "cgroup.procs"))

    def over_limit(self) -> bool:
        """Returns whether the kernel has killed a process because of the limit on memory."""
        if self.directory is None:
            return False
        with suppress(OSError):
            events = (self.directory / "memory.events").read_text().split()
            return int(dict(zip(events[::2], events[1::2], strict=True))["oom_kill"]) > 0
        return False


class ControlGroups:
    """The groups of one runner."""

    def __init__(self) -> None:
        self._root: Path | None = None
        self._numbers = itertools.count(1)
        self._left: list[Path] = []
        """Groups whose last process had not ended with their context."""

    def adopt(self) -> None:
        """Uses the delegated group of this process. Raises `FailedPrecondition` with the reason if
        there is none."""
        root = delegated_group()
        try:
            (root / _RUNNER).mkdir(exist_ok=True)
            # A group with processes cannot have limited children.
            for process in (root / "cgroup.procs").read_text().split():
                (root / _RUNNER / "cgroup.procs").write_text(process)
            enabled = " ".join(f"+{name}" for name in _CONTROLLERS)
            (root / "cgroup.subtree_control").write_text(enabled)
        except OSError as error:
            raise FailedPrecondition(f"{root}: {error.strerror}") from None
        self._root = root

    @contextmanager
    def group(self, *, memory_bytes: int, processes: int) -> Iterator[ControlGroup]:
        """Makes a group for one sandbox, and ends its processes with the context; 0: no limit."""
        if self._root is None:
            yield ControlGroup()
            return
        self._left = [each for each in self._left if not _is_removed(each)]
        directory = self._root / f"{_SANDBOX}{next(self._numbers)}"
        try:
            _make(directory, memory_bytes=memory_bytes, processes=processes)
        except OSError as error:
            # Resource limits remain, as on a host without delegation.
            log.warning("control_group_failed", directory=str(directory), error=error.strerror)
            yield ControlGroup()
            return
        try:
            yield ControlGroup(directory=directory)
        finally:
            with suppress(OSError):
                (directory / "cgroup.kill").write_text("1")
            if not _is_removed(directory):
                self._left.append(directory)


def _make(directory: Path, *, memory_bytes: int, processes: int) -> None:
    directory.mkdir()
    if memory_bytes:
        (directory / "memory.max").write_text(str(memory_bytes))
        # Else the host's swap would take the excess.
        with suppress(FileNotFoundError):
            (directory / "memory.swap.max").write_text("0")
        (directory / "memory.oom.group").write_text("1")
    if processes:
        (directory / "pids.max").write_text(str(processes))


def delegated_group() -> Path:
    """Returns the delegated group of this process. Raises `FailedPrecondition`."""
    names = dict(line.split("::", 1) for line in _lines("/proc/self/cgroup") if "::" in line)
    mounted = next((line for line in _lines("/proc/self/mountinfo") if " - cgroup2 " in line), "")
    if "0" not in names or not mounted:
        raise FailedPrecondition("there are no control groups of version 2")
    directory = Path(mounted.split()[4]) / names["0"].lstrip("/")
    if directory.name == _RUNNER:
        directory = directory.parent
    if not _is_delegated(directory):
        raise FailedPrecondition(f"{directory} is not delegated to this process (Delegate=yes)")
    controllers = (directory / "cgroup.controllers").read_text().split()
    if missing := [name for name in _CONTROLLERS if name not in controllers]:
        raise FailedPrecondition(f"{directory} has no controller {' and '.join(missing)}")
    return directory


def _is_delegated(directory: Path) -> bool:
    """By the mark of systemd; or a plain user owns it and can write to it."""
    for mark in ("trusted.delegate", "user.delegate"):
        with suppress(OSError):
            if os.getxattr(directory, mark) == b"1":
                return os.access(directory / "cgroup.procs", os.W_OK)
    with suppress(OSError):
        own = os.getuid() != 0 and directory.stat().st_uid == os.getuid()
        return own and os.access(directory / "cgroup.procs", os.W_OK)
    return False


def _is_removed(directory: Path) -> bool:
    try:
        directory.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


CONTROL_GROUPS: Final = ControlGroups()
"""Control groups of this process; without `adopt` its groups limit nothing."""
