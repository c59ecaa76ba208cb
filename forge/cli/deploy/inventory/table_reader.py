"""Reads values of the tables of a TOML file, with one line for each error. Pure."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping
from typing import Any

from forge.core.errors import ConfigError

Table = Mapping[str, Any]


class TableReader:
    """Reads values of tables, and collects the errors: a wrong value counts as its default."""

    def __init__(self, source: str) -> None:
        self._source = source
        self.errors: list[ConfigError] = []

    def fail(self, text: str) -> None:
        """Add an error."""
        self.errors.append(ConfigError(f"{self._source}: {text}"))

    def wrong(self, key: str, value: Any, allowed: str) -> None:
        """Add the error of a value."""
        self.fail(f"{key} = {value!r} is not allowed: {allowed}")

    def known(self, prefix: str, table: Table, keys: Collection[str]) -> None:
        """Add an error for each key that is not one of `keys`."""
        for key in table:
            if key not in keys:
                near = difflib.get_close_matches(key, keys, n=1) or list(keys)
                meant = " or ".join(near)
                self.fail(f"there is no key {prefix}{key}; did you mean {meant}?")

    def table(self, prefix: str, table: Table, key: str) -> Table:
        """Return a table; an empty one if it is absent."""
        value = table.get(key, {})
        if not isinstance(value, dict):
            self.wrong(prefix + key, value, f"a table [{prefix}{key}]")
            return {}
        return value

    def text(
        self, prefix: str, table: Table, key: str, default: str, form: re.Pattern[str] | None = None
    ) -> str:
        """Return a text. `form`: of the whole text, of letters, digits and -_."""
        value = table.get(key, default)
        if not isinstance(value, str) or (form is not None and not form.fullmatch(value)):
            self.wrong(prefix + key, value, "a text" if form is None else "letters, digits and -_.")
            return default
        return value

    def number(
        self, prefix: str, table: Table, key: str, default: int, bounds: tuple[int, int]
    ) -> int:
        """Return a whole number within bounds, both included."""
        value = table.get(key, default)
        least, most = bounds
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            self.wrong(prefix + key, value, f"a whole number from {least} to {most}")
            return default
        return value

    def texts(self, prefix: str, table: Table, key: str) -> tuple[str, ...]:
        """Return a list of texts."""
        value = table.get(key, [])
        if not isinstance(value, list) or not all(isinstance(one, str) and one for one in value):
            self.wrong(prefix + key, value, 'a list of texts, like ["a", "b"]')
            return ()
        return tuple(value)
