"""The content of OpenAI's messages: a text, or parts with text."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from forge.core.errors import InvalidArgument


class Part(msgspec.Struct):
    """A content part."""

    type: str
    text: str | None = None
    refusal: str | None = None


def text_of(content: str | list[Part] | None, kinds: Collection[str]) -> str:
    """Returns the joined text. Raises `InvalidArgument` for a part that is neither of `kinds` nor a
    refusal."""
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if part.type not in kinds and part.type != "refusal":
            raise InvalidArgument(f"content of type {part.type[:40]!r}; the model takes text only")
    return "".join(part.text or part.refusal or "" for part in content)
