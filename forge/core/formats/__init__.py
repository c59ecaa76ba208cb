"""How models write reasoning and tool calls: the vocabulary, and formats by name.

Owns no format itself: `base` has the vocabulary, `registry` the names, and each format a module
or, where only tags differ, a class.
"""

from __future__ import annotations

from forge.core.formats.base import (
    Answer,
    CallDelta,
    Delta,
    OutputFormat,
    Parser,
    ReasoningDelta,
    TextDelta,
    Tools,
    collect,
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
    "Answer",
    "CallDelta",
    "Delta",
    "OutputFormat",
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
]
