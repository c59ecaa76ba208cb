"""The `forge` command, from what each command knows of itself: the same as its `--help`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import typer

from docs.hooks.page import Page, escaped, table
from forge.cli.main import app

_INTRODUCTION = """# Commands

`forge --help` and `forge COMMAND --help` print the same. The settings of `forge agents run` are
those of the [runner](settings.md#runner).
"""
_MARKED = re.compile(r"\[(bold|dim)\](.*?)\[/\1\]", re.DOTALL)
_ESCAPED = re.compile(r"\\+\[")


def page() -> Page:
    """One section for each command, groups of commands in the order of `--help`."""
    lines = [_INTRODUCTION]
    for words, command in _commands(("forge",), typer.main.get_command(app)):
        lines += [f"## {' '.join(words)}", "", _help(command), ""]
        lines += _arguments(command)
    return Page(path="reference/commands.md", text="\n".join(lines))


def _commands(words: tuple[str, ...], command: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, below in getattr(command, "commands", {}).items():
        if hasattr(below, "commands"):
            yield from _commands((*words, name), below)
        else:
            yield (*words, name), below


def _arguments(command: Any) -> list[str]:
    rows = [
        (_name(parameter), _default(parameter), _markdown(getattr(parameter, "help", None) or ""))
        for parameter in command.params
        if not getattr(parameter, "hidden", False)
    ]
    return table(["argument or option", "default", "meaning"], rows) if rows else []


def _help(command: Any) -> str:
    return escaped(_markdown(inspect.cleandoc(command.help or "")))


def _markdown(text: str) -> str:
    """A text of the terminal: marked commands are code, escaped brackets are brackets."""
    return _ESCAPED.sub("[", _MARKED.sub(r"`\2`", text))


def _name(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return f"`{parameter.metavar or parameter.name.upper()}`"
    return ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))


def _default(parameter: Any) -> str:
    if parameter.required:
        return "required"
    default = parameter.default
    return "" if default in (None, "", [], ()) or callable(default) else f"`{default}`"
