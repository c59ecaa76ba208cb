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
    "Accepted drafts by head, from 1; only after accepted earlier drafts.",
    ["head"],
)
DRAFT_DEPTH = gauge(
    "forge_inference_draft_depth",
    "Tokens drafted per sequence and step at the present load; 0: drafting is off because it gains "
    "too little.",
)
DRAFT_GAIN = gauge(
    "forge_inference_draft_gain",
    "Estimated rate of sampling with drafts over the rate without, at the present load.",
)
CACHED_STATES = gauge(
    "forge_inference_cached_states",
    "Recurrent states in the prefix cache.",
)
EVICTED_STATES = counter(
    "forge_inference_evicted_states_total",
    "Recurrent states evicted from the prefix cache; a later prompt computes their tokens again.",
)
MEMORY_SHORTAGES = counter(
    "forge_inference_memory_shortages_total",
    "Work that ran out of memory: prefill or decode, by outcome: split (the pass is repeated in "
    "smaller parts), reread (all its requests are read again), refused (one request alone), "
    "uncached (keys and values were not kept for later requests).",
    ["work", "outcome"],
)
