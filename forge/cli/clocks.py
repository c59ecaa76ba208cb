"""Compares the clocks of a running system with this machine's."""

from __future__ import annotations

from forge.core.clocks import Clock, Comparison, compare
from forge.runtime.coordination import Coordinator
from forge.runtime.process.clock_watch import read_clocks
from forge.runtime.rpc import Channels


async def compare_clocks(coordinator: Coordinator, channels: Channels) -> tuple[int, Comparison]:
    """Returns the number of services that answered, and all clocks. Raises `Unavailable`."""
    clocks = await read_clocks(channels, await coordinator.all_instances())
    return len(clocks), compare([Clock(name="this machine", offset_s=0.0), *clocks])
