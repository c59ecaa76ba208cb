"""Metrics of the vLLM engine."""

from __future__ import annotations

from forge.runtime.telemetry import counter

CACHE_GAPS = counter(
    "forge_inference_vllm_cache_gaps_total",
    "Gaps in vLLM's cache events, by outcome: replayed (vLLM sent the events again), or lost (the "
    "worker reports its cached blocks again).",
    ["outcome"],
)
