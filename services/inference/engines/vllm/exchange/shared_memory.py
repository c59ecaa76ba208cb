"""Memory that the worker and vLLM's process share. It has no name in any file system: vLLM's
process opens it through /proc, and it ends with the worker, also by SIGKILL.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO, Literal

from forge.runtime.files.write_at import write_at

Address = tuple[str, int]
"""Path and inode. After `close` the path may be that of other memory, of another request."""


class SharedMemory:
    """The worker's side."""

    def __init__(self, name: str) -> None:
        """`name`: for the system's list of open files."""
        self._opened = os.memfd_create(name, os.MFD_CLOEXEC)
        path = f"/proc/{os.getpid()}/fd/{self._opened}"
        self.address: Address = path, os.fstat(self._opened).st_ino

    @property
    def size(self) -> int:
        """Number of bytes that were written."""
        return os.fstat(self._opened).st_size

    def fileno(self) -> int:
        """Return the descriptor, for a mapping."""
        return self._opened

    def write(self, data: bytes | memoryview, *, at: int = 0) -> None:
        """Copy bytes to an offset. Raises OSError without memory for them."""
        write_at(self._opened, data, at)

    def read(self, size: int) -> bytes:
        """Return the first bytes, fewer if fewer were written."""
        return os.pread(self._opened, size, 0)

    def close(self) -> None:
        """Free it. vLLM's process may keep it open."""
        os.close(self._opened)


def open_shared(address: Address, mode: Literal["rb", "r+b"] = "rb") -> BinaryIO:
    """Open memory in vLLM's process. Raises OSError if the worker has closed it."""
    path, inode = address
    file: BinaryIO = Path(path).open(mode)  # noqa: SIM115 (the caller closes it)
    if os.fstat(file.fileno()).st_ino != inode:
        file.close()
        raise FileNotFoundError(f"{path} is other memory by now")
    return file
