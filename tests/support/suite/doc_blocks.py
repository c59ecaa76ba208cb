"""Code blocks of Markdown pages."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]
_BLOCK = re.compile(r"^```(?P<language>\w+)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One block, without its fence."""

    language: str
    text: str


def blocks(page: str, *, of: frozenset[str] = frozenset({"python", "sh"})) -> list[Block]:
    """The blocks of a page of the repository in these languages, in their order."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = [Block(language=one["language"], text=one["text"]) for one in _BLOCK.finditer(text)]
    return [block for block in found if block.language in of]
