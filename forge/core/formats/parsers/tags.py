"""Splits a stream of text at tags that may arrive in pieces.

Shared by all streaming formats: text passes on as soon as it cannot be the start of a tag.
"""

from __future__ import annotations

from collections.abc import Sequence


def held_back(text: str, tags: Sequence[str]) -> int:
    """Return the number of characters at the end of `text` that may start one of `tags`."""
    longest = max((len(tag) for tag in tags), default=0)
    for length in range(min(longest - 1, len(text)), 0, -1):
        if any(tag.startswith(text[-length:]) for tag in tags):
            return length
    return 0


def first_tag(text: str, tags: Sequence[str]) -> tuple[int, str] | None:
    """Position and spelling of the leftmost tag in `text`; the longest, where several start."""
    found = [(text.find(tag), -len(tag), tag) for tag in tags if tag in text]
    if not found:
        return None
    position, _, tag = min(found)
    return position, tag
