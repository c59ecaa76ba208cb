"""Arguments of commands that argparse reads: bounds of numbers, and errors of one line.

Not here: settings of services (`reader`), and the commands of typer (`forge.cli.usage_errors`).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Annotated, Any, NoReturn

import msgspec
from msgspec import Meta

from forge.runtime.settings.reader import allowed


class OneLineParser(argparse.ArgumentParser):
    """Ends a command with a wrong argument in one line."""

    def error(self, message: str) -> NoReturn:
        """Print the error and exit with 2."""
        text = message.removeprefix("argument ").replace(": ", " ", 1)
        self.exit(2, f"{self.prog}: {text}; see {self.prog} --help\n")


def _number(kind: Any) -> Callable[[str], Any]:
    """Return the `type` of an argument with the bounds of an annotation."""

    def converted(text: str) -> Any:
        try:
            return msgspec.convert(text, kind, strict=False)
        except msgspec.ValidationError:
            raise argparse.ArgumentTypeError(f"{text!r} is not allowed: {allowed(kind)}") from None

    return converted


COUNT = _number(Annotated[int, Meta(ge=1)])
NATURAL = _number(Annotated[int, Meta(ge=0)])
POSITIVE = _number(Annotated[float, Meta(gt=0)])
SHARE = _number(Annotated[float, Meta(ge=0, le=1)])
