"""One line for each wrong use of a command line, in place of typer's box.

Owns the texts. `command_exit` prints them.
"""

from __future__ import annotations

from typing import Any

import typer

from forge.core.errors import InvalidArgument

USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]
"""Typer exports no name for the class of all errors of usage."""
_WORDS = {
    "Input should be ": "",
    "a valid integer": "a whole number",
    "a valid number": "a number",
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
}
"""Words of pydantic, and those of other errors here."""
_CHOICE = "is not one of "


def usage_error(error: Any, command: str) -> InvalidArgument | None:
    """Return the error with its option, value and remedy; None if `error` shows a help page itself.
    `command`: the one whose help page to name, unless `error` has its own."""
    if type(error).__name__ == "NoArgsIsHelpError":
        return None
    command = error.ctx.command_path if error.ctx else command
    text = _wrong_value(error) or _sentence(error.format_message())
    return InvalidArgument(f"{text}; see {command} --help")


def _wrong_value(error: Any) -> str:
    """The text for a value of another form; "" for any other error, and where typer has the value
    in its message."""
    details = getattr(error.__cause__, "errors", None)
    if details is None or error.param is None:
        return ""
    detail = details()[0]
    option, value = error.param.opts[0], repr(detail["input"])
    said = detail["msg"].partition(", unable to")[0]
    if _CHOICE in said:
        return f"{option} {value} must be one of {said.partition(_CHOICE)[2].rstrip('.')}"
    for words, ours in _WORDS.items():
        said = said.replace(words, ours)
    return f"{option} {value} must be {said}"


def _sentence(message: str) -> str:
    return message[:1].lower() + message[1:].rstrip(".").replace(" (Possible", " (possible")
