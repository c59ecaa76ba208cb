"""Help pages of commands, from their docstrings."""

from __future__ import annotations

import inspect

import typer
from typer.models import CommandInfo, TyperInfo


def join_lines(app: typer.Typer) -> None:
    """Join the lines of each paragraph in the help of all commands: typer keeps the line breaks of
    every paragraph but the first, which are those of the source."""
    pages: list[CommandInfo | TyperInfo] = [*app.registered_commands]
    pages += [app.registered_callback] if app.registered_callback else []
    for page in pages:
        text = page.help or inspect.getdoc(page.callback) or ""
        page.help = "\n\n".join(" ".join(one.split("\n")) for one in text.split("\n\n"))
    for group in app.registered_groups:
        if group.typer_instance is not None:
            join_lines(group.typer_instance)
