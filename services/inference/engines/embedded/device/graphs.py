"""CUDA graphs of one device: their capture, and their numbers of rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

Output = TypeVar("Output")

_SIZES = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Rows of a graph; a step with more rows has none."""


def rows_for(rows: int) -> int | None:
    """Return the rows of the smallest graph for so many; None above all."""
    return next((size for size in _SIZES if size >= rows), None)


class DeviceGraphs:
    """Captures graphs that share their memory; the output of one is read before another runs."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.are_available = device.type == "cuda"
        self._pool: Any = None

    def capture(self, run: Callable[[], Output]) -> tuple[Any, Output]:
        """Return a graph of what `run` launches, and its output. Raises RuntimeError for one that
        waits for the device."""
        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            # The first passes load libraries and compile kernels.
            for _ in range(2):
                run()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # Other threads copy keys, values and weights meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            output = run()
        return graph, output
