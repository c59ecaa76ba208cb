"""Compares this process's wall clock with those of its peers, and says which one is off.

A clock that is off costs more than wrong times in logs: tokens expire by it. The watch corrects
nothing; an operator sets the clock.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence

from forge.core.clocks import Clock, Comparison, compare
from forge.core.errors import ForgeError
from forge.runtime.coordination import Coordinator, Instance
from forge.runtime.rpc.channel import Channels
from forge.runtime.rpc.clock import read_clock
from forge.runtime.telemetry import gauge, log

PERIOD_S = 60.0
PEERS = 8
"""Most clocks read at a time, of as many hosts as there are."""
READ_S = 5.0
REMEDY = "set it by NTP (chrony or systemd-timesyncd)"

_OFFSET = gauge(
    "forge_clock_offset_seconds", "This host's clock minus the median of its peers' clocks."
)


class ClockWatch:
    """Reads the clocks of some peers at registration and every minute after it."""

    def __init__(
        self,
        coordinator: Coordinator,
        channels: Channels,
        *,
        own: Instance,
        on_offset: Callable[[float | None], Awaitable[None]],
    ) -> None:
        """`on_offset`: gets how far this clock is off, and None once it is not."""
        self._coordinator = coordinator
        self._channels = channels
        self._own = own
        self._on_offset = on_offset
        self._known_off: frozenset[str] = frozenset()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            try:
                await self.look()
            except ForgeError as error:
                log.debug("clocks_not_compared", error=str(error))
            await asyncio.sleep(PERIOD_S)

    async def look(self) -> None:
        """Compare once. Raises `Unavailable` when etcd does not answer."""
        others = [
            one for one in await self._coordinator.everybody() if one.address != self._own.address
        ]
        own = Clock(name=clock_name(self._own), offset_s=0.0)
        clocks = await read_clocks(self._channels, _spread(others))
        if not clocks:
            return
        found = compare([own, *clocks])
        _OFFSET.set(-found.reference.offset_s)
        self._log(found)
        own_off = [one.offset_s for one in found.off if one.name == own.name and found.decided]
        await self._on_offset(own_off[0] if own_off else None)

    def _log(self, found: Comparison) -> None:
        """Once for each clock that begins to be off."""
        for clock, line in zip(found.off, found.lines(), strict=True):
            if clock.name not in self._known_off:
                log.warning("clock_off", offset_s=clock.offset_s, clock=line, remedy=REMEDY)
        self._known_off = frozenset(clock.name for clock in found.off)


def clock_name(instance: Instance) -> str:
    """Return the name of an instance's clock for the log."""
    return f"{instance.instance_id} at {instance.address}"


async def read_clocks(channels: Channels, instances: Sequence[Instance]) -> list[Clock]:
    """The clocks of those that answer, in the order of `instances`."""

    async def read(instance: Instance) -> Clock:
        channel = channels.get(instance.address)
        return await read_clock(channel, name=clock_name(instance), timeout_s=READ_S)

    read_all = await asyncio.gather(*map(read, instances), return_exceptions=True)
    for outcome in read_all:
        # An instance of an earlier release has no such service, one that is gone no clock.
        if isinstance(outcome, BaseException) and not isinstance(outcome, ForgeError):
            raise outcome
    return [clock for clock in read_all if isinstance(clock, Clock)]


def _spread(instances: Sequence[Instance]) -> list[Instance]:
    """A random few, of different hosts as far as there are."""
    shuffled = random.sample(instances, len(instances))
    first_of_host = {instance.address.rpartition(":")[0]: instance for instance in shuffled}
    chosen = list(first_of_host.values())
    chosen += [instance for instance in shuffled if instance not in chosen]
    return chosen[:PEERS]
