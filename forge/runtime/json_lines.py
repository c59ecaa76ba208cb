"""Files of JSON Lines: UTF-8, blank lines allowed, line numbers from 1."""

from __future__ import annotations

from pathlib import Path


def numbered_lines(file: Path) -> list[tuple[int, str]]:
    """The lines that are not blank, each with its number. Raises OSError, UnicodeDecodeError."""
    # `splitlines` splits at more characters than JSON Lines does.
    lines = file.read_text(encoding="utf-8").split("\n")
    return [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
