"""The models beside the policy of `forge run` and `forge up`: the file of `--models`.

Owns the format: the gateway's tables `[models.NAME]`, and for each model that the run serves itself
`weights` and `seed`. The gateway checks all other fields.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge.cli.models import ensure_model, tiny_directory
from forge.core.errors import InvalidArgument

START = "start"
"""Value of `weights`: the starting weights of the run."""
_SERVED = ("version", "engine")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingGroup:
    """Router and workers of one model."""

    name: str
    model_path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedModels:
    """The models of a stack."""

    tables: str = ""
    """The gateway's setting `models`; "": none."""
    groups: tuple[ServingGroup, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunModels:
    """The tables of a file."""

    tables: Mapping[str, Mapping[str, Any]]

    @classmethod
    def read(cls, file: Path) -> RunModels:
        """Reads a file. Raises `InvalidArgument` with the file and the wrong table."""
        try:
            content = tomllib.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            problem = getattr(error, "strerror", None) or error
            raise InvalidArgument(f"--models {file}: {problem}") from None
        tables = content.get("models")
        if content.keys() != {"models"} or not isinstance(tables, dict):
            raise InvalidArgument(f"--models {file}: it must have tables [models.NAME] alone")
        for name, table in tables.items():
            _check(f"--models {file}: models.{name}", table)
        return cls(tables=tables)

    async def ensured(self, start: str, *, root: Path) -> PlannedModels:
        """Makes or fetches missing weights; `start` is the directory of the run's own. Raises the
        errors of `ensure_model`."""
        paths = {
            name: await _ensure(table, start, root)
            for name, table in self.tables.items()
            if table["kind"] in _SERVED
        }
        return self._planned(paths)

    def known(self, start: str, *, root: Path) -> PlannedModels:
        """Returns the models whose weights are on this machine already, for a check of settings."""
        paths = {
            name: path
            for name, table in self.tables.items()
            if table["kind"] in _SERVED and (path := _present(table, start, root))
        }
        return self._planned(paths)

    def _planned(self, paths: Mapping[str, str]) -> PlannedModels:
        tables, groups = {}, []
        for name, table in self.tables.items():
            row = {key: value for key, value in table.items() if key not in ("weights", "seed")}
            if table["kind"] in _SERVED:
                if name not in paths:
                    continue
                if table["kind"] == "engine":
                    row.setdefault("model_path", paths[name])
                groups.append(ServingGroup(name=table.get("group") or name, model_path=paths[name]))
            tables[name] = row
        # Two tables may name one group; the first one starts it.
        first = {group.name: group for group in reversed(groups)}
        return PlannedModels(
            tables=json.dumps(tables) if tables else "", groups=tuple(first.values())
        )


def _check(where: str, table: Any) -> None:
    if not isinstance(table, dict) or not isinstance(table.get("kind"), str):
        raise InvalidArgument(f"{where} must be a table with kind")
    for key, kind, noun in (("weights", str, "a text"), ("seed", int, "a whole number")):
        if not isinstance(table.get(key, kind()), kind):
            raise InvalidArgument(f"{where}.{key} = {table[key]!r} must be {noun}")
    if table["kind"] not in _SERVED:
        for key in ("weights", "seed"):
            if key in table:
                raise InvalidArgument(f"{where}.{key} is not for kind = {table['kind']!r}")
    elif not _weights(table):
        raise InvalidArgument(f"{where}.weights is missing: {START}, tiny, smollm2 or a directory")


def _weights(table: Mapping[str, Any]) -> str:
    return str(table.get("weights") or table.get("model_path") or "")


async def _ensure(table: Mapping[str, Any], start: str, root: Path) -> str:
    if (weights := _weights(table)) == START:
        return start
    return str(await ensure_model(weights, seed=table.get("seed", 0), root=root))


def _present(table: Mapping[str, Any], start: str, root: Path) -> str:
    weights = _weights(table)
    if weights == START:
        return start
    if weights == "tiny":
        made = tiny_directory(root, seed=table.get("seed", 0))
        return str(made.resolve()) if (made / "config.json").exists() else ""
    return str(Path(weights).resolve()) if Path(weights).is_dir() else ""
