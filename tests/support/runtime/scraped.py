"""Metrics of a running process, as a scraper reads them."""

from __future__ import annotations

import urllib.request
from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families

_READ_S = 60.0


def scraped(metadata: Mapping[str, str]) -> str:
    """Return /metrics of a process. `metadata`: of its directory entry. Raises OSError."""
    address = f"http://{metadata['metrics']}/metrics"
    with urllib.request.urlopen(address, timeout=_READ_S) as response:
        return str(response.read().decode())


def by_label(text: str, name: str, label: str) -> dict[str, float]:
    """Return the values of a metric by its label."""
    return {
        sample.labels[label]: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name
    }
