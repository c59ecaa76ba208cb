"""The dashboard against Grafana's own schema, by its SDK."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from grafana_foundation_sdk.cog import plugins
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

DASHBOARD = Path(__file__).parents[2] / "deploy" / "grafana" / "forge.json"


def unknown(dashboard: Any) -> list[str]:
    """The paths that the schema does not know, or has with another value."""
    read = JSONEncoder().encode(Dashboard.from_json(copy.deepcopy(dashboard)))
    return list(_differences(dashboard, json.loads(read), ""))


def _differences(ours: Any, theirs: Any, path: str) -> Iterator[str]:
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key, value in ours.items():
            yield from _differences(value, theirs.get(key), f"{path}/{key}")
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            yield from _differences(one, other, f"{path}/{number}")
    elif ours != theirs:
        yield path


def test_dashboard_has_only_what_grafana_knows() -> None:
    """Each key and value is one of the schema; a wrong one would be ignored by Grafana."""
    plugins.register_default_plugins()
    dashboard = json.loads(DASHBOARD.read_text())
    assert unknown(dashboard) == []
    panel = next(one for one in dashboard["panels"] if one["type"] == "timeseries")
    panel["fieldConfig"]["defaults"]["unitt"] = panel["fieldConfig"]["defaults"].pop("unit")
    panel["targets"][0]["expression"] = panel["targets"][0].pop("expr")
    assert [path.rpartition("/")[2] for path in unknown(dashboard)] == ["unitt", "expression"]
