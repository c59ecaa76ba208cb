"""The models beside the policy that a stack serves: their weights on disk, and their groups."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge.cli.local_run.models.models import ensure_model, tiny_directory
from forge.cli.local_run.models.run_models import SERVED, START, RunModels, weights_of


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


async def ensured(models: RunModels, start: str, *, root: Path) -> PlannedModels:
    """Makes or fetches missing weights; `start` is the directory of the run's own. Raises the
    errors of `ensure_model`."""
    paths = {
        name: await _ensure(table, start, root)
        for name, table in models.tables.items()
        if table["kind"] in SERVED
    }
    return _planned(models, paths)


def known(models: RunModels, start: str, *, root: Path) -> PlannedModels:
    """Returns the models whose weights are on this machine already, for a check of settings."""
    paths = {
        name: path
        for name, table in models.tables.items()
        if table["kind"] in SERVED and (path := _present(table, start, root))
    }
    return _planned(models, paths)


def _planned(models: RunModels, paths: Mapping[str, str]) -> PlannedModels:
    tables, groups = {}, []
    for name, table in models.tables.items():
        row = {key: value for key, value in table.items() if key not in ("weights", "seed")}
        if table["kind"] in SERVED:
            if name not in paths:
                continue
            if table["kind"] == "engine":
                row.setdefault("model_path", paths[name])
            groups.append(ServingGroup(name=table.get("group") or name, model_path=paths[name]))
        tables[name] = row
    # Two tables may name one group; the first one starts it.
    first = {group.name: group for group in reversed(groups)}
    return PlannedModels(
        tables=json.dumps(tables, default=str) if tables else "", groups=tuple(first.values())
    )


async def _ensure(table: Mapping[str, Any], start: str, root: Path) -> str:
    if (weights := weights_of(table)) == START:
        return start
    return str(await ensure_model(weights, seed=table.get("seed", 0), root=root))


def _present(table: Mapping[str, Any], start: str, root: Path) -> str:
    weights = weights_of(table)
    if weights == START:
        return start
    if weights == "tiny":
        made = tiny_directory(root, seed=table.get("seed", 0))
        return str(made.resolve()) if (made / "config.json").exists() else ""
    return str(Path(weights).resolve()) if Path(weights).is_dir() else ""
