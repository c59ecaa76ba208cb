"""Counters of spans."""

from forge.runtime.telemetry import counter

EXPORTED = counter("forge_tracing_spans_exported_total", "Spans that the collector accepted.")
DROPPED = counter(
    "forge_tracing_spans_dropped_total",
    "Lost spans, by reason: queue_full, or collector (it did not accept them).",
    ["reason"],
)
