"""Command line of every benchmark, and the output of its numbers."""

from __future__ import annotations

import argparse
import json
import logging
import warnings
from collections.abc import Mapping
from pathlib import Path

import structlog
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table


def arguments(about: str, *, quick: str) -> argparse.ArgumentParser:
    """`--quick` and `--json`; `about` is the benchmark's docstring, `quick` what it leaves out."""
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    return parser


def progress_bar() -> Progress:
    """Name, count and time of a task, on stderr."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
    )


def silence_libraries() -> None:
    """Print errors alone, not the notes of libraries about each of many models."""
    logging.disable(logging.WARNING)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    warnings.simplefilter("ignore")


def show(title: str, numbers: Mapping[str, float]) -> None:
    """A table of names and values."""
    table = Table(title=title)
    table.add_column("what")
    table.add_column("value", justify="right")
    for name, value in numbers.items():
        table.add_row(name, _written(value))
    Console().print(table)


def _written(value: float) -> str:
    if 0 < abs(value) < 0.01:
        return f"{value:.2e}"
    return f"{value:,.3f}" if abs(value) < 100 else f"{value:,.0f}"


def keep(numbers: Mapping[str, float], path: Path | None) -> None:
    """Written where `--json` says, if it was given."""
    if path is not None:
        path.write_text(json.dumps(numbers, indent=1) + "\n")
