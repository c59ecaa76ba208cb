"""The program `forge`: a signal ends it without a traceback, also while its modules load.

Owns the signals until a command has handlers of its own.
"""

import signal
from typing import NoReturn


def main() -> None:
    """Runs the command of this process.

    While modules load, a signal ends the process at once. Later, Ctrl-C, SIGTERM and the end of
    the terminal raise `KeyboardInterrupt`, so that a command removes its temporary files.
    """
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


if __name__ == "__main__":
    main()
