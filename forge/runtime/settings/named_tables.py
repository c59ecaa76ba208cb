"""Settings that are tables by name, `[models.NAME]`: each has the fields of one dataclass.

Owns their reading and their errors. In flags and variables they are one JSON object.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Mapping
from typing import Any, get_args, get_origin, get_type_hints

import msgspec

from forge.core.errors import ConfigError


def row_type(kind: Any) -> type[Any] | None:
    """Return the dataclass of a setting's tables; None for another setting."""
    row = get_args(kind)[1] if get_origin(kind) is Mapping else None
    return row if dataclasses.is_dataclass(row) and isinstance(row, type) else None


def read_tables(
    key: str, value: Any, row: type[Any], *, allowed: Callable[[Any], str]
) -> dict[str, Any]:
    """Return the tables of a setting by name. Raises `ConfigError` with the first wrong field."""
    try:
        tables = msgspec.json.decode(value) if isinstance(value, str) else value
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise ConfigError(f"{key} is not a JSON object of tables: {error}") from None
    if not isinstance(tables, dict) or not all(isinstance(one, dict) for one in tables.values()):
        raise ConfigError(f"{key} = {value!s:.80} is not allowed: tables [{key}.NAME]")
    return {name: _row(f"{key}.{name}", table, row, allowed) for name, table in tables.items()}


def _row(key: str, table: Mapping[str, Any], row: type[Any], allowed: Callable[[Any], str]) -> Any:
    kinds = get_type_hints(row, include_extras=True)
    values = {}
    for name, value in table.items():
        if name not in kinds:
            near = difflib.get_close_matches(name, kinds, n=1) or list(kinds)
            raise ConfigError(
                f"there is no setting {key}.{name} = {value!r}; did you mean {' or '.join(near)}?"
            )
        try:
            values[name] = msgspec.convert(value, kinds[name])
        except ValueError:
            raise ConfigError(
                f"{key}.{name} = {value!r} is not allowed: {allowed(kinds[name])}"
            ) from None
    for one in dataclasses.fields(row):
        absent = one.default is dataclasses.MISSING and one.default_factory is dataclasses.MISSING
        if absent and one.name not in values:
            raise ConfigError(f"{key}.{one.name} is missing: {allowed(kinds[one.name])}")
    return row(**values)
