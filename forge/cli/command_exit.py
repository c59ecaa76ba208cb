"""The output and the end of a command: errors in one line, exit codes, Ctrl-C."""

from __future__ import annotations

import signal
import sys
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperGroup

from forge.cli.usage_errors import USAGE_ERROR, usage_error
from forge.core.errors import ForgeError
from forge.core.extras import extras_named

INTERRUPTED = 130
"""Exit code after Ctrl-C, as in shells."""

_PIPE_WIDTH = 240
"""Columns where no terminal has a width: rows of 80 would break every id."""


console = Console(
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
            return super().make_context(*args, **extra)
        except USAGE_ERROR as error:
            fail(usage_error(error, "forge") or error)

    def invoke(self, ctx: Any) -> Any:
        """Invokes the command; prints an error in one line and exits."""
        try:
            with extras_named():
                return super().invoke(ctx)
        except ForgeError as error:
            fail(error)
        except USAGE_ERROR as error:
            fail(usage_error(error, f"{ctx.command_path} {ctx.invoked_subcommand}") or error)
        except KeyboardInterrupt:
            say("Interrupted.")
            raise typer.Exit(INTERRUPTED) from None


def say(text: str | Text) -> None:
    """Prints a text without line breaks of its own; the terminal may wrap it."""
    console.print(text, soft_wrap=True)


def finish(main: Callable[[], Awaitable[None]], interrupted: str) -> None:
    """Runs an asynchronous command; Ctrl-C and SIGTERM cancel it, so that its clean-up runs."""
    import asyncio

    from forge.runtime.telemetry import log_to_people

    log_to_people()

    async def cancellable() -> None:
        task = asyncio.ensure_future(main())
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, task.cancel)
        await task

    try:
        asyncio.run(cancellable())
    except asyncio.CancelledError:
        say(interrupted)
        raise typer.Exit(INTERRUPTED) from None


def fail(error: Exception) -> NoReturn:
    """Prints each line of a `ForgeError`, most have one, and exits; raises any other error."""
    if not isinstance(error, ForgeError):
        raise error
    for line in str(error).splitlines():
        Console(stderr=True).print(Text(f"forge: {line}", style="red"), soft_wrap=True)
    raise typer.Exit(2 if not error.retryable else 1) from None
