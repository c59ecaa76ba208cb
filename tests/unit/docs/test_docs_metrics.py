"""Metrics in the docs against what the code registers."""

from __future__ import annotations

import re

from docs.hooks import metrics
from docs.hooks.page import ROOT

_NAMES = re.compile(r"`(forge_[a-z]\w*[a-z])`")
_OF_HISTOGRAMS = re.compile(r"_(bucket|sum|count)$")


def test_metrics_page_has_every_metric() -> None:
    """Each metric that a module registers has one row."""
    rows = [line.split(" | ") for line in metrics.page().text.splitlines() if line.startswith("|")]
    for name, metric in metrics.registered().items():
        (row,) = [row for row in rows if row[0] == f"| `{name}`"]
        assert row[1] == metric._type
        assert re.findall(r"\w+", row[2]) == list(metric._labelnames)
        assert len(row[3].removesuffix("|").strip()) > 0, f"{name} has no meaning"


def test_docs_name_only_existing_metrics() -> None:
    """A metric that is renamed in the code is renamed in the docs."""
    registered = metrics.registered().keys()
    for page in (*(ROOT / "docs").glob("*.md"), *(ROOT / "services").glob("*/README.md")):
        for name in _NAMES.findall(page.read_text(encoding="utf-8")):
            assert _OF_HISTOGRAMS.sub("", name) in registered, f"{page.name}: {name}"
