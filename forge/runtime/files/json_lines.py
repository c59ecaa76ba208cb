"""Files of JSON Lines: UTF-8, blank lines allowed, line numbers from 1."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from forge.core.errors import InvalidArgument


def read_json_lines(file: Path) -> list[tuple[int, Any]]:
    """Return the value of each line that is not blank, with its number. Raises OSError, and
    InvalidArgument with file and line for text that is not UTF-8 or not JSON."""
    try:
        # `splitlines` splits at more characters than JSON Lines does.
        lines = file.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"{file} is not UTF-8: {error}") from None
    return [
        (number, _parsed(line, f"{file}, line {number}"))
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]


def _parsed(line: str, place: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise InvalidArgument(f"{place} is not JSON: {error}") from None
    except RecursionError:
        raise InvalidArgument(f"{place} is nested too deeply") from None
