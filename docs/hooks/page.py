"""A page of the site that no file in docs/ holds, and the tables such pages are made of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
"""The repository."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """One generated page."""

    path: str
    """Where it stands in the site, as MkDocs names sources: `reference/settings.md`."""
    text: str


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table, with a blank line behind them."""
    lines = [header, ["---"] * len(header), *rows]
    return [*("| " + " | ".join(map(_cell, line)) + " |" for line in lines), ""]


def _cell(text: str) -> str:
    return escaped(" ".join(text.replace("|", "\\|").split()))


def escaped(text: str) -> str:
    """Plain text with code, as Markdown: elsewhere a bracket would begin an element or a link."""
    parts = text.split("`")
    parts[::2] = [part.replace("<", "&lt;").replace("[", "\\[") for part in parts[::2]]
    return "`".join(parts)
