"""The result of one check of `forge doctor`, and its line.

Also reads findings of checks that run as a program of their own: one JSON object a line.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.text import Text

from forge.cli.command_exit import say


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of one check."""

    ok: bool
    text: str
    remedy: str = ""
    was_run: bool = True
    """False: the text says why the check was not run."""

    @property
    def lines(self) -> tuple[str, ...]:
        """The finding, and its remedy if it is a problem."""
        mark = ("ok " if self.ok else "BAD") if self.was_run else "-- "
        remedy = (f"    {self.remedy}",) if self.remedy and not self.ok else ()
        return (f"{mark} {self.text}", *remedy)


def report(finding: Finding) -> None:
    """Prints one finding, and its remedy if it is a problem."""
    style = ("green" if finding.ok else "red") if finding.was_run else "dim"
    (first, *others) = finding.lines
    say(Text.assemble((first[:3], style), first[3:]))
    for line in others:
        say(line)


def findings_of(command: Sequence[str], *, remedy: str) -> Iterator[Finding]:
    """Yields the findings that a program prints. `remedy`: for a program that ends early."""
    try:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
    except OSError as error:
        yield Finding(ok=False, text=f"{command[0]}: {error}", remedy=remedy)
        return
    assert process.stdout is not None
    for line in process.stdout:
        # Other lines are logs of a library.
        if line.startswith("{"):
            yield Finding(**json.loads(line))
    _, errors = process.communicate()
    if process.returncode:
        reason = errors.strip().rpartition("\n")[2] or f"exit code {process.returncode}"
        yield Finding(ok=False, text=f"the checks ended early: {reason}", remedy=remedy)
