"""docs/metrics.md against what the code registers."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

from forge.runtime import telemetry

ROOT = Path(__file__).parents[3]
LIST = ROOT / "docs" / "metrics.md"
ROW = re.compile(r"\| `(?P<name>forge_\w+)`(?: `\{(?P<labels>[\w, ]+)\}`)? \| (?P<kind>\w+) \| \S")
KINDS = frozenset({"counter", "gauge", "histogram"})


def test_the_list_of_metrics_has_every_metric_with_its_labels_and_kind() -> None:
    """docs/metrics.md lists the metrics of all services as they are registered, and no others."""
    for module in modules_with_metrics():
        importlib.import_module(module)
    rows = [ROW.match(line) for line in LIST.read_text(encoding="utf-8").splitlines()]
    listed = {row["name"]: (row["kind"], row["labels"] or "") for row in rows if row}
    registered = {
        name: (metric._type, ", ".join(metric._labelnames))
        for name, metric in telemetry._metrics.items()
        if not name.startswith("forge_test")
    }
    assert listed == registered
    assert sum(row is not None for row in rows) == len(listed), "a metric is listed twice"


def modules_with_metrics() -> Iterator[str]:
    """Modules that call `counter`, `gauge` or `histogram` of the telemetry."""
    for part in ("forge", "services"):
        for path in sorted((ROOT / part).rglob("*.py")):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            imported = {
                alias.name
                for node in ast.walk(tree)
                if isinstance(node, ast.ImportFrom) and node.module == telemetry.__name__
                for alias in node.names
            }
            if imported & KINDS:
                yield ".".join(path.relative_to(ROOT).with_suffix("").parts)
