"""A real MDB_PANIC: the meta page of a shard that is open in this process cannot be written.

`python -m tests.support.pool.lmdb_panic` is a pool instance that panics after SIGUSR1.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from pathlib import Path


def break_meta_page(data_dir: Path) -> None:
    """LMDB's descriptor for meta pages, the one with O_DSYNC, leads to a full device from now on.

    The first commit then fails for want of room; LMDB answers MDB_PANIC to everything after it.
    """
    data = str((data_dir / "data.mdb").resolve())
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        for descriptor in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
            if _target(descriptor) == data and _flags(descriptor) & os.O_DSYNC:
                os.dup2(full, descriptor)
    finally:
        os.close(full)


def _target(descriptor: int) -> str:
    try:
        return str(Path(f"/proc/self/fd/{descriptor}").readlink())
    except OSError:
        return ""


def _flags(descriptor: int) -> int:
    lines = Path(f"/proc/self/fdinfo/{descriptor}").read_text().splitlines()
    (flags,) = (line.split()[1] for line in lines if line.startswith("flags:"))
    return int(flags, 8)


def _on_signal(*_: object) -> None:
    break_meta_page(Path(sys.argv[sys.argv.index("--data-dir") + 1]))


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, _on_signal)
    runpy.run_module("services.pool", run_name="__main__")
