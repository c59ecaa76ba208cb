"""Arguments of commands that argparse reads: bounds of numbers, and errors of one line.

Not here: settings of services (`reader`), and the commands of typer (`forge.cli.usage_errors`).
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NoReturn

import msgspec
from msgspec import Meta

from forge.runtime.settings.reader import allowed


class OneLineParser(argparse.ArgumentParser):
    """Ends a command with a wrong argument in one line. Its help page has the defaults."""

    def __init__(self, *, prog: str, description: str) -> None:
        super().__init__(prog=prog, description=description, formatter_class=_Defaults)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Refuse an unknown option before a missing one: it is often the missing one."""
        for word in sys.argv[1:] if args is None else args:
            option = word.partition("=")[0]
            known = [*self._option_string_actions]
            if option.startswith("--") and not any(one.startswith(option) for one in known):
                near = difflib.get_close_matches(option, known, n=1)
                hint = f" (did you mean {near[0]}?)" if near else ""
                self.error(f"no such option {option}{hint}")
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Print the error and exit with 2."""
        text = message.removeprefix("argument ").replace(": ", " ", 1)
        self.exit(2, f"{self.prog}: {text}; see {self.prog} --help\n")


class _Defaults(argparse.HelpFormatter):
    def _get_help_string(self, action: argparse.Action) -> str | None:
        plain = action.default in (None, False, argparse.SUPPRESS)
        return action.help if plain else f"{action.help} (default: %(default)s)"


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
