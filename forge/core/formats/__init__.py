"""Formats of reasoning and tool calls in a model's text.

`base` has the contract, `registry` the names, `parsers` the common parts. Each format is a module
or, where only tags differ, a class.
"""

from __future__ import annotations

from forge.core.formats.base import (
    CallDelta,
    Delta,
    OutputFormat,
    ParsedAnswer,
    Parser,
    ReasoningDelta,
    TextDelta,
    Tools,
    collect,
    reads_channels,
)
from forge.core.formats.plain import PlainParser
from forge.core.formats.registry import (
    SAMPLE_CALL,
    SAMPLE_TOOLS,
    detect_format,
    detect_reasoning,
    get_format,
    get_reasoning,
)
from forge.core.formats.think import ReasoningFormat, ThinkParser

__all__ = [
    "SAMPLE_CALL",
    "SAMPLE_TOOLS",
    "CallDelta",
    "Delta",
    "OutputFormat",
    "ParsedAnswer",
    "Parser",
    "PlainParser",
    "ReasoningDelta",
    "ReasoningFormat",
    "TextDelta",
    "ThinkParser",
    "Tools",
    "collect",
    "detect_format",
    "detect_reasoning",
    "get_format",
    "get_reasoning",
    "reads_channels",
]
