"""Patterns of schemas, which may match anywhere, as expressions of a complete text."""

from __future__ import annotations

import re

from llguidance import regex_to_lark


def whole_text(pattern: str) -> str:
    """Returns a Lark expression of the texts in which `pattern` matches. Raises `ValueError` for a
    pattern with anchors inside, or with alternatives that an anchor divides."""
    inner = pattern.removeprefix("^")
    ended = inner.endswith("$") and not inner.endswith("\\$")
    inner = inner[:-1] if ended else inner
    anchored = ended or pattern.startswith("^")
    if anchored and (_has_choice(inner) or re.search(r"(?<!\\)[$]|(?<![\\\[])\^", inner)):
        raise ValueError("a pattern with anchors in it, or alternatives beside them")
    lead = "" if pattern.startswith("^") else "(?s:.*)"
    trail = "" if ended else "(?s:.*)"
    try:
        return f"{lead}({regex_to_lark(inner, use_ascii='')}){trail}"
    except ValueError as error:
        raise ValueError(f"the pattern: {error}") from None


def _has_choice(pattern: str) -> bool:
    """Returns True for alternatives outside of groups."""
    outside = re.sub(r"\\.|\[(?:\\.|[^\]\\])*\]", "", pattern, flags=re.DOTALL)
    depth = 0
    for character in outside:
        depth += {"(": 1, ")": -1}.get(character, 0)
        if character == "|" and depth <= 0:
            return True
    return False
