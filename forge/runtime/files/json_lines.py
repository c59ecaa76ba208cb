"""Files of JSON Lines: UTF-8 with or without a byte order mark, blank lines allowed, line numbers
from 1."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from forge.core.errors import InvalidArgument
from forge.core.strict_json import DECODER


def read_json_lines(file: Path) -> list[tuple[int, Any]]:
    """Return the value of each line that is not blank, with its number. Raises OSError, and
    InvalidArgument with file and line for text that is not UTF-8 or not JSON."""
    try:
        # `splitlines` splits at more characters than JSON Lines does.
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        number = error.object.count(b"\n", 0, error.start) + 1
        byte = error.object[error.start]
        raise InvalidArgument(
            f"{file}, line {number} is not UTF-8 (byte 0x{byte:02x}): save the file as UTF-8"
        ) from None
    if lines[0].strip() in ("[", "{", "[{"):
        raise InvalidArgument(
            f"{file}, line 1 is not a whole JSON value: write each value on one line, without a "
            "list around them (JSON Lines)"
        )
    return [
        (number, parsed_json(line, f"{file}, line {number}"))
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]


def parsed_json(text: str, place: str) -> Any:
    """Return a value of JSON that programs in all languages read: without NaN, infinite numbers and
    half surrogate pairs. Raises InvalidArgument, which begins with `place`."""
    try:
        value = DECODER.decode(text)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise InvalidArgument(
            f"{place} has {half.encode('unicode-escape').decode()}, half a surrogate pair: write "
            "the character itself, or both halves"
        ) from None
    except ValueError as error:
        raise InvalidArgument(f"{place} is not JSON: {error}") from None
    except RecursionError:
        raise InvalidArgument(f"{place} is nested too deeply") from None
