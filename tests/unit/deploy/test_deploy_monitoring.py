"""Alerts and dashboard against the metrics that the code registers."""

from __future__ import annotations

import json
import re
import runpy
from collections.abc import Iterator
from functools import cache

import pytest
import yaml  # type: ignore[import-untyped]

from docs.hooks import metrics
from docs.hooks.page import ROOT

RULES = ROOT / "deploy/prometheus/forge.rules.yml"
DASHBOARD = ROOT / "deploy/grafana"
RUNBOOK = ROOT / "docs/alerts.md"
OF_TARGETS = {"job", "cluster", "service", "instance"}
"""Labels that the scrape adds."""
_SELECTED = re.compile(r"\b((?:forge|DCGM)_\w+)(?:\{([^}]*)\})?")
_KEPT = re.compile(r"\bby \(([^)]*)\)")
_SHOWN = re.compile(r"\{\{ *(?:\$labels\.)?(\w+) *\}\}")


def rules() -> list[dict[str, str]]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def queries() -> Iterator[tuple[str, str, str]]:
    """Each expression, with the text that shows its labels."""
    for rule in rules():
        yield rule["alert"], rule["expr"], rule["annotations"]["summary"]  # type: ignore[index]
    for panel in json.loads((DASHBOARD / "forge.json").read_text())["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"], target["legendFormat"]


@cache
def registered() -> dict[str, tuple[str, ...]]:
    """The labels of each metric; found once, by reading all modules."""
    return {name: tuple(metric._labelnames) for name, metric in metrics.registered().items()}


def labels_of(name: str) -> tuple[str, ...]:
    """The labels of a metric. Raises `KeyError`."""
    known = registered()
    return known[name] if name in known else known[re.sub(r"_(sum|count|bucket)$", "", name)]


@pytest.mark.parametrize(("title", "expression", "shown"), list(queries()))
def test_query_reads_existing_metrics_and_labels(title: str, expression: str, shown: str) -> None:
    """A renamed metric or label would leave an alert silent forever."""
    labels = set(OF_TARGETS)
    for name, selectors in _SELECTED.findall(expression):
        own = set(labels_of(name)) | OF_TARGETS
        assert set(re.findall(r"(\w+)\s*[!=][=~]?", selectors)) <= own, name
        labels |= own
    for kept in _KEPT.findall(expression):
        assert set(re.findall(r"\w+", kept)) <= labels
        labels = set(re.findall(r"\w+", kept))
    assert set(_SHOWN.findall(shown)) <= labels


def test_queries_select_values_that_the_code_has() -> None:
    """A misspelled value of a label would leave an alert silent forever, too."""
    modules = [path for part in ("forge", "services") for path in (ROOT / part).rglob("*.py")]
    source = "\n".join(path.read_text() for path in modules)
    selected = {
        value
        for _, expression, _ in queries()
        for selectors in re.findall(r"\b(?:forge_\w+|up)\{([^}]*)\}", expression)
        for values in re.findall(r'"([^"]*)"', selectors)
        for value in values.split("|")
        if value != "$cluster"
    }
    assert {"running", "infrastructure", "gateway"} <= selected
    assert {value for value in selected if f'"{value}"' not in source} == set()


def test_each_alert_has_its_section_in_the_run_book() -> None:
    """And no section is about an alert that does not exist."""
    sections = re.findall(r"^## (Forge\w+)$", RUNBOOK.read_text(), re.M)
    assert sections == [rule["alert"] for rule in rules()]


def test_dashboard_is_what_its_program_writes() -> None:
    """`make dashboard` renews it."""
    program = runpy.run_path(str(DASHBOARD / "dashboard.py"))
    assert json.loads((DASHBOARD / "forge.json").read_text()) == program["dashboard"]()
