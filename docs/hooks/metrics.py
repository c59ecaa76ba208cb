"""Every metric that a process serves, from the modules that register them."""

from __future__ import annotations

import ast
import importlib
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from typing import Any

from docs.hooks.page import ROOT, Page, table
from forge.runtime import telemetry

KINDS = frozenset({"counter", "gauge", "histogram"})
_SECTIONS = {
    "gateway": "Gateway",
    "pool": "Pool",
    "scheduler": "Scheduler",
    "inference": "Inference",
    "trainer": "Trainer",
    "console": "Console",
    "runner": "Agent runner",
}
"""By the second word of a name; any other word is a metric of every process."""


def page() -> Page:
    """One table for each service, then one of what every process has."""
    by_section: dict[str, list[tuple[str, ...]]] = defaultdict(list)
    for name, metric in sorted(registered().items()):
        section = _SECTIONS.get(name.split("_")[1], "Every process")
        labels = ", ".join(f"`{label}`" for label in metric._labelnames)
        by_section[section].append((f"`{name}`", metric._type, labels, metric._documentation))
    lines = ["# Metrics", "", "[How to read them](../metrics.md).", ""]
    for section in (*_SECTIONS.values(), "Every process"):
        lines += [f"## {section}", ""]
        lines += table(["metric", "kind", "labels", "meaning"], by_section[section])
    return Page(path="reference/metrics.md", text="\n".join(lines))


@cache
def registered() -> dict[str, Any]:
    """Every metric of the repository by name, as prometheus-client's object."""
    for module in _modules_with_metrics():
        importlib.import_module(module)
    return {n: m for n, m in telemetry._metrics.items() if not n.startswith("forge_test")}


def _modules_with_metrics() -> Iterator[str]:
    """Modules that import `counter`, `gauge` or `histogram` of the telemetry."""
    for part in ("forge", "services"):
        for path in sorted((ROOT / part).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            if telemetry.__name__ not in text:
                continue
            tree = ast.parse(text)
            imported = {
                alias.name
                for node in ast.walk(tree)
                if isinstance(node, ast.ImportFrom) and node.module == telemetry.__name__
                for alias in node.names
            }
            if imported & KINDS:
                yield ".".join(path.relative_to(ROOT).with_suffix("").parts)
