"""A source of weights in a process of its own, to be frozen and killed.

`python -m tests.support.inference.weight_source_process VERSION FILL MIB PAUSE_S` serves one tensor
`w` of MIB MiB with bytes FILL, waits PAUSE_S before each slice, and prints its address.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from types import TracebackType
from typing import Self

from forge.runtime.process.child_processes import dying_with_parent
from tests.support.inference.weight_sources import Source

MIB = 1 << 20


def weights(fill: int, mib: int) -> dict[str, bytes]:
    return {"w": bytes([fill]) * (mib * MIB)}


class SourceProcess:
    """The process; ended by SIGKILL."""

    def __init__(
        self,
        version: int,
        *,
        fill: int,
        mib: int,
        pause_s: float = 0.0,
        bulk_slices: int | None = None,
    ) -> None:
        """`bulk_slices`: send so many over a bulk connection, as `bulk_sources`."""
        program = "weight_source_process" if bulk_slices is None else "bulk_sources"
        argv = [sys.executable, "-m", f"tests.support.inference.{program}"]
        argv += map(str, (version, fill, mib, pause_s if bulk_slices is None else bulk_slices))
        self._process = subprocess.Popen(dying_with_parent(argv), stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("127.0.0.1:"):
                self.address = line.strip()
                break

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()
        self._process.wait()

    def freeze(self) -> None:
        """SIGSTOP: connections stay, nothing is sent."""
        self._process.send_signal(signal.SIGSTOP)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()
        assert self._process.stdout is not None
        self._process.stdout.close()


async def _serve(version: int, fill: int, mib: int, pause_s: float) -> None:
    source = Source(pause_s=pause_s)
    source.held[version] = weights(fill, mib)
    print(await source.start(), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])))
