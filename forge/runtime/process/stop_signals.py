"""The signals that stop a process or a command, in order and with its clean-up.

Knows only their numbers: what a stop is, a service and a command decide.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""SIGHUP comes from a closed terminal and a lost ssh session."""


def hang_up_ends() -> bool:
    """Return False if this process outlives its terminal, as `nohup` starts it."""
    return signal.getsignal(signal.SIGHUP) != signal.SIG_IGN


def on_stop_signal(stop: Callable[[signal.Signals], object]) -> None:
    """Call `stop` in the running event loop at each signal, SIGHUP only if `hang_up_ends`."""
    loop = asyncio.get_running_loop()
    for number in STOP_SIGNALS:
        if number != signal.SIGHUP or hang_up_ends():
            loop.add_signal_handler(number, stop, number)
