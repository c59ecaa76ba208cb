"""CUDA graphs of one device: their capture, and their numbers of rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from forge.rl.out_of_memory import memory_shortage
from forge.runtime.telemetry import log

Output = TypeVar("Output")

_SIZES = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Rows of a graph; a step with more rows has none."""


class DeviceGraphs:
    """Captures graphs that share their memory; the output of one is read before another runs.
    Graphs for which there was no memory are not tried again."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.are_available = device.type == "cuda"
        self._pool: Any = None
        self._without_memory = _SIZES[-1] + 1
        """Graphs of as many rows or more have no memory."""

    def rows_for(self, rows: int) -> int | None:
        """Return the rows of the smallest graph for so many; None above all."""
        size = next((size for size in _SIZES if size >= rows), None)
        return None if size is None or size >= self._without_memory else size

    def is_shortage(self, error: RuntimeError, *, rows: int) -> bool:
        """Return True if memory was short for a graph of `rows` rows; from now on `rows_for` omits
        this size."""
        shortage = memory_shortage(error)
        if shortage:
            self._without_memory = min(self._without_memory, rows)
            log.warning("graph_without_memory", rows=rows, reason=shortage)
        return bool(shortage)

    def leave_memory(self) -> None:
        """Give the next graphs memory of their own. torch captures none into the memory of graphs
        that are all gone while a tensor of theirs is left."""
        self._pool = None

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
