"""The program `forge`: a signal ends it without a traceback, also while its modules load.

Owns the signals until a command has handlers of its own.
"""

import signal


def main() -> None:
    """Runs the command of this process.

    While modules load, Ctrl-C ends the process at once. Later, Ctrl-C and SIGTERM raise
    `KeyboardInterrupt`, so that a command removes its temporary files.
    """
    # Ignored if a shell has started this command in the background.
    interrupt = signal.getsignal(signal.SIGINT)
    if interrupt is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from forge.cli.main import app

    signal.signal(signal.SIGINT, interrupt)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    app()


if __name__ == "__main__":
    main()
