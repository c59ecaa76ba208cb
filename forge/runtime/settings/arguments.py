"""Arguments of commands that argparse reads: bounds of numbers, and errors of one line.

Not here: settings of services (`reader`), and the commands of typer (`forge.cli.usage_errors`).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn, TypeVar

Number = TypeVar("Number", int, float)
_NOUNS = {int: "a whole number", float: "a number"}


class OneLineParser(argparse.ArgumentParser):
    """Ends a command with a wrong argument in one line."""

    def error(self, message: str) -> NoReturn:
        """Print the error and exit with 2."""
        text = message.removeprefix("argument ").replace(": ", " ", 1)
        self.exit(2, f"{self.prog}: {text}; see {self.prog} --help\n")


def at_least(kind: type[Number], least: Number) -> Callable[[str], Number]:
    """Return the `type` of an argument with a smallest value."""
    return _number(kind, f"of at least {least}", lambda value: value >= least)


def above(kind: type[Number], bound: Number) -> Callable[[str], Number]:
    """Return the `type` of an argument above `bound`."""
    return _number(kind, f"above {bound}", lambda value: value > bound)


def within(kind: type[Number], least: Number, most: Number) -> Callable[[str], Number]:
    """Return the `type` of an argument from `least` to `most`."""
    return _number(kind, f"from {least} to {most}", lambda value: least <= value <= most)


def _number(
    kind: type[Number], bounds: str, fits: Callable[[Number], bool]
) -> Callable[[str], Number]:
    def converted(text: str) -> Number:
        with suppress(ValueError):
            if fits(value := kind(text)):
                return value
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed: {_NOUNS[kind]} {bounds}")

    return converted
