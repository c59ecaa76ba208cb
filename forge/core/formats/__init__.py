"""Formats by name, and which of them a chat template speaks.

Owns the registry. Another package adds a format without touching this one: an entry point in the
group `forge.formats` that names an `OutputFormat` class.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points

from forge.core.errors import ConfigError
from forge.core.formats.base import (
    Answer,
    CallDelta,
    Delta,
    OutputFormat,
    Parser,
    ReasoningDelta,
    TextDelta,
    collect,
)
from forge.core.formats.hermes import HermesFormat
from forge.core.formats.plain import PlainFormat, PlainParser
from forge.core.formats.think import ThinkParser

__all__ = [
    "Answer",
    "CallDelta",
    "Delta",
    "OutputFormat",
    "Parser",
    "PlainParser",
    "ReasoningDelta",
    "TextDelta",
    "ThinkParser",
    "collect",
    "detect_format",
    "get_format",
]

BUILT_IN: dict[str, Callable[[], OutputFormat]] = {"plain": PlainFormat, "hermes": HermesFormat}


def get_format(name: str) -> OutputFormat:
    """The format called `name`; raises `ConfigError` naming those there are."""
    if name in BUILT_IN:
        return BUILT_IN[name]()
    added = {entry.name: entry for entry in entry_points(group="forge.formats")}
    if name in added:
        made: OutputFormat = added[name].load()()
        return made
    raise ConfigError(f"tool format {name!r} is unknown; there are {sorted({*BUILT_IN, *added})}")


def detect_format(template: str) -> str:
    """Name of the format that a chat template asks models to write calls in."""
    if "<tool_call>" in template and "<function=" not in template:
        return "hermes"
    return "plain"
