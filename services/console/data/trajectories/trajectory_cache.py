"""Trajectories that were read last: pages ask for one many times, part by part."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from forge.v1 import common_pb2 as pb

FRESH_S = 15.0
"""Age at which a trajectory is read again: turns and rewards may have been added."""


@dataclass(frozen=True, slots=True)
class _Entry:
    trajectory: pb.Trajectory
    size_bytes: int
    read_s: float


class TrajectoryCache:
    """Reads one trajectory at a time, and keeps the last ones within a size."""

    def __init__(
        self,
        find: Callable[[str], Awaitable[pb.Trajectory]],
        *,
        most_bytes: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._find = find
        self._most_bytes = most_bytes
        self._clock = clock
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._bytes = 0
        self._reading = asyncio.Lock()

    async def get(self, trajectory_id: str) -> pb.Trajectory:
        """Return a trajectory. Raises as `PoolReader.find`."""
        async with self._reading:
            entry = self._entries.get(trajectory_id)
            if entry is not None and self._clock() - entry.read_s < FRESH_S:
                self._entries.move_to_end(trajectory_id)
                return entry.trajectory
            self._drop(trajectory_id)
            trajectory = await self._find(trajectory_id)
            self._keep(trajectory_id, trajectory)
            return trajectory

    def _keep(self, trajectory_id: str, trajectory: pb.Trajectory) -> None:
        size = trajectory.ByteSize()
        if size > self._most_bytes:
            return
        self._entries[trajectory_id] = _Entry(trajectory, size, self._clock())
        self._bytes += size
        while self._bytes > self._most_bytes:
            self._drop(next(iter(self._entries)))

    def _drop(self, trajectory_id: str) -> None:
        entry = self._entries.pop(trajectory_id, None)
        if entry is not None:
            self._bytes -= entry.size_bytes
