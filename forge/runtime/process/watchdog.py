"""The watchdog of systemd: beats while the event loop turns and the actors handle their messages.

A process that hangs, or an actor whose messages wait for `WatchdogSec` while it handles none, gets
no beat; systemd then kills the process and starts it again. Without systemd there is no watchdog.
Sources: sd_watchdog_enabled(3), systemd.exec(5).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from typing import Protocol

from forge.runtime.actors.actor_system import ActorSystem
from forge.runtime.telemetry import log


class Notifier(Protocol):
    """Socket of systemd; see sd_notify(3)."""

    def notify(self, state: str) -> None:
        """Send a state."""


def limit_s(environ: Mapping[str, str]) -> float:
    """Return the unit's `WatchdogSec`; 0 without a watchdog for this process."""
    if environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return 0.0
    return int(environ.get("WATCHDOG_USEC", 0)) / 1e6


def ends_unit(environ: Mapping[str, str]) -> bool:
    """Return whether the end of this process is that of its unit: not of a rank, which torchrun
    starts again. systemd kills a unit that says STOPPING=1 and does not end."""
    return environ.get("SYSTEMD_EXEC_PID", str(os.getpid())) == str(os.getpid())


async def feed_watchdog(systemd: Notifier, actors: ActorSystem, limit_s: float) -> None:
    """Beat three times in `limit_s`, except while an actor is stalled. Runs until cancelled."""
    while True:
        if stalled := actors.stalled(limit_s):
            log.error("actors_stalled", actors=stalled[:10], count=len(stalled), for_s=limit_s)
        else:
            systemd.notify("WATCHDOG=1")
        await asyncio.sleep(limit_s / 3)
