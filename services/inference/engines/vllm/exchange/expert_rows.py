"""The experts of one request, in memory that vLLM's process fills (`expert_recorder`)."""

from __future__ import annotations

from typing import Any

from forge.core.routes import RouteShape, RouteSpan
from services.inference.engines.vllm.exchange.shared_memory import SharedMemory

ASKED = "forge_experts"
"""Key in `SamplingParams.extra_args`: an address, and the first token whose row it gets."""


class ExpertRows:
    """Rows of the tokens from `start` on."""

    def __init__(self, shape: RouteShape, *, start: int) -> None:
        self._shape = shape
        self._start = start
        self._memory = SharedMemory("forge-experts")

    def extra_args(self) -> dict[str, Any]:
        """Return the arguments with which vLLM's process fills the rows."""
        return {ASKED: [self._memory.address, self._start]}

    def read(self, end: int) -> RouteSpan | None:
        """Return the rows before the token `end`; None if there are none."""
        wanted = max(0, end - self._start) * self._shape.row_bytes
        return self._shape.span(self._memory.read(wanted), start=self._start)

    def close(self) -> None:
        """Free it."""
        self._memory.close()
