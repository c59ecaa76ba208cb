"""The output and the end of a command: errors in one line, exit codes, signals."""

from __future__ import annotations

import errno
import os
import select
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn, TextIO

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperGroup

from forge.cli.usage_errors import USAGE_ERROR, usage_error
from forge.core.errors import ForgeError
from forge.core.extras import extras_named

INTERRUPTED = 130
"""Exit code after Ctrl-C, as in shells."""

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

_PIPE_WIDTH = 240
"""Columns where no terminal has a width: rows of 80 would break every id."""


class _Output(Console):
    """The output of commands. A command whose reader is gone, or whose output has no space, ends at
    its next line; one whose terminal is gone continues. The clean-up of a command runs to its end
    in all cases."""

    stopping = False
    """True once a signal or a lost reader has ended the command."""

    def __exit__(self, *error: Any) -> None:
        """Writes the lines of a block."""
        try:
            super().__exit__(*error)
        except OSError as failure:
            if failure.errno == errno.EIO:
                drop_lost_output()
            elif failure.errno in _FULL and self.stopping:
                _discard(sys.stdout)
            else:
                self.stopping = failure.errno in _FULL or self.stopping
                raise

    def on_broken_pipe(self) -> None:
        """See `Console`."""
        drop_lost_output()
        if not self.stopping:
            self.stopping = True
            raise SystemExit(1)


console = _Output(
    # Without markup: names, paths and reasons may have brackets, such as [/INST].
    markup=False,
    highlight=False,
    width=None if sys.stdout.isatty() else _PIPE_WIDTH,
)


class Commands(TyperGroup):
    """Ends a command in one line if it raises `ForgeError`, lacks an optional package, has a wrong
    option, or is interrupted."""

    def make_context(self, *args: Any, **extra: Any) -> Any:
        """Parses the options before the command; prints an error of usage in one line and exits."""
        try:
            with _full_disks_named():
                return super().make_context(*args, **extra)
        except USAGE_ERROR as error:
            fail(usage_error(error, "forge") or error)

    def invoke(self, ctx: Any) -> Any:
        """Invokes the command; prints an error in one line and exits."""
        try:
            with extras_named(), _full_disks_named():
                return super().invoke(ctx)
        except ForgeError as error:
            fail(error)
        except USAGE_ERROR as error:
            fail(usage_error(error, f"{ctx.command_path} {ctx.invoked_subcommand}") or error)
        except KeyboardInterrupt:
            say("Interrupted.")
            raise typer.Exit(INTERRUPTED) from None


@contextmanager
def _full_disks_named() -> Iterator[None]:
    """Ends a command in one line if its standard output, or a file of its own, cannot grow."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        # Otherwise the lines that could not be written are written again at the exit.
        _discard(sys.stdout)
        with suppress(OSError):
            sys.stderr.write(f"forge: {error.filename or 'the output'}: {error.strerror}\n")
        raise typer.Exit(1) from None


def say(text: str | Text) -> None:
    """Prints a text without line breaks of its own; the terminal may wrap it."""
    console.print(text, soft_wrap=True)


def finish(main: Callable[[], Awaitable[None]], interrupted: str) -> None:
    """Runs an asynchronous command; Ctrl-C, SIGTERM and the end of its terminal cancel it, so that
    its clean-up runs. A further Ctrl-C cancels the clean-up."""
    import asyncio

    from forge.runtime.process.stop_signals import on_stop_signal
    from forge.runtime.telemetry import log_to_people

    log_to_people()

    async def cancellable() -> None:
        task = asyncio.ensure_future(main())
        signaled = False

        def stop(number: signal.Signals) -> None:
            nonlocal signaled
            drop_lost_output()
            # When a terminal ends, the shell and the kernel send SIGHUP, and readers end, too.
            if not console.stopping or (signaled and number == signal.SIGINT):
                task.cancel()
            signaled = console.stopping = True

        console.stopping = False
        on_stop_signal(stop)
        await task

    try:
        asyncio.run(cancellable())
    except asyncio.CancelledError:
        say(interrupted)
        raise typer.Exit(INTERRUPTED) from None


def drop_lost_output() -> None:
    """Replaces stdout and stderr by the null device if their terminal or reader is gone, so that
    no later line raises."""
    for stream in (sys.stdout, sys.stderr):
        # A program that uses a command may have replaced them.
        with suppress(OSError, ValueError):
            poll = select.poll()
            poll.register(stream.fileno(), 0)
            if poll.poll(0):
                _discard(stream)


def _discard(stream: TextIO) -> None:
    """Sends the stream's later lines to the null device."""
    with Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())


def fail(error: Exception) -> NoReturn:
    """Prints each line of a `ForgeError`, most have one, and exits; raises any other error."""
    if not isinstance(error, ForgeError):
        raise error
    for line in str(error).splitlines():
        Console(stderr=True).print(Text(f"forge: {line}", style="red"), soft_wrap=True)
    raise typer.Exit(2 if not error.retryable else 1) from None
