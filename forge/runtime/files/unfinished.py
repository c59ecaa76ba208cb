"""Files and directories that are complete under their name, or absent, also after a kill.

They are filled under another name first. A lock tells a writer that works from one that was killed;
the next writer removes what that one left.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from forge.core.errors import FailedPrecondition
from forge.runtime.files.sync import sync


def unfinished(path: Path) -> Path:
    """Return the name of a file or directory until it is complete."""
    return path.with_name(f".{path.name}.unfinished")


@contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """Yield an empty directory for the length of a block, which fills it. It then gets its name,
    on disk; after an error it is removed.

    Raises OSError, and `FailedPrecondition` while another process fills it.
    """
    filling = unfinished(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    filling.mkdir(exist_ok=True)
    opened = os.open(filling, os.O_RDONLY | os.O_DIRECTORY)
    try:
        lock_unfinished(opened, path)
        try:
            for left in filling.iterdir():
                shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()
            yield filling
            for each in (*filling.rglob("*"), filling):
                if not each.is_symlink():
                    sync(each)
            filling.rename(path)
        except BaseException:
            shutil.rmtree(filling, ignore_errors=True)
            raise
        sync(path.parent)
    finally:
        os.close(opened)


def lock_unfinished(opened: int, path: Path) -> None:
    """Lock the open, unfinished file or directory of `path`. Raises `FailedPrecondition` if another
    process writes it, or has completed it meanwhile."""
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise FailedPrecondition(f"another process writes {path}: name another") from None
    try:
        ours = os.path.samestat(unfinished(path).stat(), os.fstat(opened))
    except FileNotFoundError:
        ours = False
    if not ours:
        raise FailedPrecondition(f"another process wrote {path}: name another")
