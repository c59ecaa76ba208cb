"""The program `forge`: a signal ends it without a traceback, also while its modules load.

Owns the signals until a command has handlers of its own.
"""

import os
import signal
import sys
from pathlib import Path
from typing import NoReturn


def main() -> None:
    """Runs the command of this process.

    While modules load, a signal ends the process at once. Later, Ctrl-C, SIGTERM and the end of
    the terminal raise `KeyboardInterrupt`, so that a command removes its temporary files.
    """
    _open_closed_streams()
    # Ignored if a shell has started this command in the background.
    interrupt = signal.getsignal(signal.SIGINT)
    if interrupt is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from forge.cli.command_exit import drop_lost_output
    from forge.cli.main import app
    from forge.runtime.process.stop_signals import hang_up_ends

    def hang_up(*_: object) -> NoReturn:
        drop_lost_output()
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if hang_up_ends():
        signal.signal(signal.SIGHUP, hang_up)
    app()


def _open_closed_streams() -> None:
    """Opens the null device in place of standard streams that the parent has closed: otherwise the
    next socket would have the number of one."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # It gets the lowest free number, which is that of the stream.
            stream = Path(os.devnull).open(mode, errors="replace")  # noqa: SIM115 - for the process
            setattr(sys, name, stream)


if __name__ == "__main__":
    main()
