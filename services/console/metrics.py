"""Metrics of the console."""

from __future__ import annotations

from forge.runtime.telemetry import counter, gauge

VIEWERS = gauge("forge_console_viewers", "Pages with live updates.")
REQUESTS = counter("forge_console_requests_total", "HTTP requests, by status.", ["status"])
READS = counter(
    "forge_console_reads_total",
    "Reads of other services for live pages, by topic and result: ok, failed.",
    ["topic", "result"],
)
DROPPED = counter(
    "forge_console_dropped_viewers_total", "Live pages dropped because they did not read for 10 s."
)
