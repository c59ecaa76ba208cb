"""Texts of agents, tasks and paths on the terminal: brackets in them are not markup."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import typer
from rich.table import Table
from rich.text import Text

from forge.cli.command_exit import console, say
from forge.cli.finding import Finding, report
from forge.cli.main import app

REASON = "KeyError: '[/INST]' of [red]task[/red]"
"""As a program of an agent ends; rich would refuse the first tag and hide the others."""


def commands_of(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    yield name, command
    for word, child in getattr(command, "commands", {}).items():
        yield from commands_of(child, f"{name} {word}")


def test_lines_and_cells_show_brackets_unchanged(capsys: pytest.CaptureFixture[str]) -> None:
    """A reason, a path or a name of a task may have any."""
    table = Table("reason")
    table.add_row(REASON)
    with console.capture() as shown:
        say(REASON)
        say(Text(REASON, style="red"))
        report(Finding(ok=False, text=REASON, remedy=REASON))
        console.print(table)
    assert shown.get().count(REASON) == 5


def test_help_of_no_option_loses_a_word_in_brackets() -> None:
    """`--help` takes unescaped brackets for a style, and drops them."""
    lost = [
        f"{name} {parameter.name}: {tag}"
        for name, command in commands_of(typer.main.get_command(app), "forge")
        for parameter in command.params
        for tag in re.findall(r"(?<!\\)\[[a-z#/@][^\[\]]*\]", getattr(parameter, "help", "") or "")
        if tag.strip("[/]") not in ("bold", "dim")
    ]
    assert lost == []
