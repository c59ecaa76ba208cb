"""A decoder of JSON as every language reads it: without NaN and infinite numbers."""

from __future__ import annotations

import json
import math
from typing import NoReturn


def _refuse(constant: str) -> NoReturn:
    # Only Python reads it; an agent in another language could not.
    raise ValueError(f"{constant} is no number of JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text:.40} is too large for a number")
    return value


DECODER = json.JSONDecoder(parse_constant=_refuse, parse_float=_finite)
"""Raises ValueError where `json.loads` returns NaN or an infinite number."""
