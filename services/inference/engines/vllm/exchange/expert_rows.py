"""The experts of one request, in memory that vLLM's process fills (`expert_recorder`)."""

from __future__ import annotations

import os
from typing import Any

from forge.core.routes import RouteShape, RouteSpan

ASKED = "forge_experts"
"""Key in `SamplingParams.extra_args`: a path, its inode, and the first token whose row it gets."""


class ExpertRows:
    """Rows of the tokens from `start` on. The memory has no name in any file system, and ends with
    `close` or with the worker."""

    def __init__(self, shape: RouteShape, *, start: int) -> None:
        self._shape = shape
        self._start = start
        self._opened = os.memfd_create("forge-experts", os.MFD_CLOEXEC)

    def extra_args(self) -> dict[str, Any]:
        """Return what has vLLM's process fill it."""
        # The inode: after `close` the path may be that of another request.
        inode = os.fstat(self._opened).st_ino
        return {ASKED: [f"/proc/{os.getpid()}/fd/{self._opened}", inode, self._start]}

    def read(self, end: int) -> RouteSpan | None:
        """Return the rows before the token `end`; None if there are none."""
        wanted = max(0, end - self._start) * self._shape.row_bytes
        return self._shape.span(os.pread(self._opened, wanted, 0), start=self._start)

    def close(self) -> None:
        """Free it."""
        os.close(self._opened)
