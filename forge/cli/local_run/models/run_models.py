"""The file of `--models`: models beside the policy of `forge run` and `forge up`.

Owns the format: the gateway's tables `[models.NAME]`, and for each model that the run serves itself
`weights` and `seed`. The gateway checks all other fields. Not here: the weights
(`forge.cli.local_run.models.served_models`).
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge.core.errors import InvalidArgument

START = "start"
"""Value of `weights`: the starting weights of the run."""
SERVED = ("version", "engine")
"""Kinds of models on serving groups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunModels:
    """The tables of a file."""

    tables: Mapping[str, Mapping[str, Any]]

    @classmethod
    def read(cls, file: Path) -> RunModels:
        """Reads a file. Raises `InvalidArgument` with the file and the wrong table."""
        try:
            content = tomllib.loads(file.read_text(encoding="utf-8-sig"))
        except (OSError, ValueError) as error:
            problem = getattr(error, "strerror", None) or error
            raise InvalidArgument(f"--models {file}: {problem}") from None
        tables = content.get("models")
        if content.keys() != {"models"} or not isinstance(tables, dict):
            raise InvalidArgument(f"--models {file}: it must have tables [models.NAME] alone")
        for name, table in tables.items():
            _check(f"--models {file}: models.{name}", table)
        return cls(tables=tables)


def weights_of(table: Mapping[str, Any]) -> str:
    """Returns the name of the weights that the workers of a model serve."""
    return str(table.get("weights") or table.get("model_path") or "")


def _check(where: str, table: Any) -> None:
    if not isinstance(table, dict) or not isinstance(table.get("kind"), str):
        raise InvalidArgument(f"{where} must be a table with kind")
    for key, kind, noun in (("weights", str, "a text"), ("seed", int, "a whole number")):
        if not isinstance(table.get(key, kind()), kind):
            raise InvalidArgument(f"{where}.{key} = {table[key]!r} must be {noun}")
    if table["kind"] not in SERVED:
        for key in ("weights", "seed"):
            if key in table:
                raise InvalidArgument(f"{where}.{key} is not for kind = {table['kind']!r}")
    elif not weights_of(table):
        raise InvalidArgument(f"{where}.weights is missing: {START}, tiny, smollm2 or a directory")
