"""Why a part of the device is not used, for one line of the log."""

from __future__ import annotations


def first_line(error: object) -> str:
    """The first line of an error's text: torch's have many."""
    return str(error).strip().partition("\n")[0]
