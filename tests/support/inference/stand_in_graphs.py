"""CUDA graphs without a device: a replay runs the captured call again, into the same output."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch

from services.inference.engines.embedded.device.graphs import DeviceGraphs, Output


@dataclass(eq=False, weakref_slot=True, slots=True)
class _Graph:
    replay: Callable[[], None]


class StandInGraphs(DeviceGraphs):
    """As those of a device: inputs are read at each replay, outputs keep their addresses, and no
    graph begins in the memory of graphs that are all gone."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.are_available = True
        self.captures = 0
        self._sharing = weakref.WeakSet[_Graph]()
        self._is_shared = False

    def leave_memory(self) -> None:
        """See `DeviceGraphs`."""
        self._is_shared = False

    def capture(self, run: Callable[[], Output]) -> tuple[Any, Output]:
        """See `DeviceGraphs`."""
        self.captures += 1
        output = run()
        if self._is_shared and not self._sharing:
            raise RuntimeError("it->second->use_count > 0 INTERNAL ASSERT FAILED")
        graph = _Graph(lambda: _overwrite(output, run()))
        self._is_shared = True
        self._sharing.add(graph)
        return graph, output


def _overwrite(output: Any, found: Any) -> None:
    if isinstance(output, torch.Tensor):
        output.copy_(found)
    elif output is not None:
        for one in fields(output):
            _overwrite(getattr(output, one.name), getattr(found, one.name))
