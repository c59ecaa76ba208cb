"""Metrics of all engines."""

from __future__ import annotations

from forge.runtime.telemetry import counter

GRAMMARS = counter(
    "forge_inference_grammars_total",
    "Requests with a grammar, by outcome: cached, compiled or refused.",
    ["outcome"],
)
REFUSED_HAND_OFFS = counter(
    "forge_inference_hand_offs_refused_total",
    "Hand-offs of keys and values that were refused, by reason: damaged, shape, place, model, or "
    "version (also by prefill: of a prompt that was computed while its weights changed).",
    ["reason"],
)
