"""Objects that installed packages register under an entry-point group.

Owns the look-up and the error of a broken entry; each registry owns its group.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Any

from forge.core.extras import import_errors


def installed(group: str) -> dict[str, EntryPoint]:
    """The entry points of a group by name, sorted."""
    return {entry.name: entry for entry in sorted(entry_points(group=group))}


def load_entry_point(entry: EntryPoint) -> Any:
    """Import the object of an entry point. Raises `ConfigError`, which names entry and cause."""
    with import_errors(f"{entry.group} {entry.name!r} cannot be loaded from {entry.value}"):
        return entry.load()
