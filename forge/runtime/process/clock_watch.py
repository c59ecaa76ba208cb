"""Compares the wall clocks of this process and its peers, and reports the wrong ones.

Tokens expire by wall clocks. The watch corrects nothing; an operator sets the clock.
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
"""Most clocks of one comparison, on as many hosts as possible."""
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
        """`on_offset` gets this clock's offset, and None once the clock is right."""
        self._coordinator = coordinator
        self._channels = channels
        self._own = own
        self._on_offset = on_offset
        self._known_off: frozenset[str] = frozenset()

    async def run(self) -> None:
        """Compare every minute until cancelled."""
        while True:
            try:
                await self.look()
            except ForgeError as error:
                log.debug("clocks_not_compared", error=str(error))
            await asyncio.sleep(PERIOD_S)

    async def look(self) -> None:
        """Compare once. Raises `Unavailable` when etcd does not answer."""
        others = [
            one
            for one in await self._coordinator.all_instances()
            if one.address != self._own.address
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
        """Log each wrong clock once."""
        for clock, line in zip(found.off, found.lines(), strict=True):
            if clock.name not in self._known_off:
                log.warning("clock_wrong", offset_s=clock.offset_s, clock=line, remedy=REMEDY)
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
        # Instances of an earlier release, and dead ones, give no clock.
        if isinstance(outcome, BaseException) and not isinstance(outcome, ForgeError):
            raise outcome
    return [clock for clock in read_all if isinstance(clock, Clock)]


def _spread(instances: Sequence[Instance]) -> list[Instance]:
    """Return a few at random, on as many hosts as possible."""
    shuffled = random.sample(instances, len(instances))
    first_of_host = {instance.address.rpartition(":")[0]: instance for instance in shuffled}
    chosen = list(first_of_host.values())
    chosen += [instance for instance in shuffled if instance not in chosen]
    return chosen[:PEERS]
