"""Metrics of the embedded engine."""

from __future__ import annotations

from forge.runtime.telemetry import counter, gauge

DRAFTED = counter(
    "forge_inference_drafted_tokens_total",
    "Tokens that a draft head drafted and a decode step verified, by head from 1.",
    ["head"],
)
ACCEPTED = counter(
    "forge_inference_accepted_drafts_total",
    "Drafts that were sampled, by head from 1; the drafts before them were, too.",
    ["head"],
)
DRAFT_DEPTH = gauge(
    "forge_inference_draft_depth",
    "Tokens drafted per sequence and step at the present load; 0: drafts do not pay.",
)
DRAFT_GAIN = gauge(
    "forge_inference_draft_gain",
    "Estimated tokens per second with drafts over those without, at the present load.",
)
CACHED_STATES = gauge(
    "forge_inference_cached_states",
    "States of recurrent layers in the prefix cache.",
)
EVICTED_STATES = counter(
    "forge_inference_evicted_states_total",
    "States of recurrent layers that left the prefix cache for others; their tokens are computed "
    "again.",
)
