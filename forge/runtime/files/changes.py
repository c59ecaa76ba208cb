"""Changes of files that a process reads again while it runs: keys and certificates."""

from __future__ import annotations

from pathlib import Path


class FileChanges:
    """The state of files, by inode, size and time of modification."""

    def __init__(self, *paths: str | Path) -> None:
        """Construct it before the first read. An empty path is no file."""
        self._paths = [Path(path) for path in paths if path]
        self._reported = self._seen = self._state()

    def settled(self) -> bool:
        """Return True once for each change; a change since the last call may be incomplete."""
        before, self._seen = self._seen, self._state()
        if self._seen == self._reported or self._seen != before:
            return False
        self._reported = self._seen
        return True

    def _state(self) -> list[tuple[int, ...]]:
        return [_state(path) for path in self._paths]


def _state(path: Path) -> tuple[int, ...]:
    try:
        return file_state(path)
    except OSError:
        return ()


def file_state(path: Path) -> tuple[int, ...]:
    """Return what tells a file from its replacement, also one of the same time. Raises OSError."""
    status = path.stat()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_mode
