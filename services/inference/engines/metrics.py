"""Metrics of all engines."""

from __future__ import annotations

from forge.runtime.telemetry import counter

GRAMMARS = counter(
    "forge_inference_grammars_total",
    "Requests with a grammar, by outcome: cached, compiled or refused.",
    ["outcome"],
)
