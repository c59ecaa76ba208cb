"""Counters of spans."""

from forge.runtime.telemetry import counter

EXPORTED = counter("forge_tracing_spans_exported_total", "Spans that the collector has taken.")
DROPPED = counter(
    "forge_tracing_spans_dropped_total",
    "Spans that are lost: the queue was full, or the collector did not take them.",
    ["reason"],
)
