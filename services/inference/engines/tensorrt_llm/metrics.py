"""Metrics of the TensorRT-LLM engine."""

from __future__ import annotations

from forge.runtime.telemetry import counter, gauge

RESTARTS = counter(
    "forge_inference_tensorrt_llm_restarts_total",
    "Starts of the library's engine after a failed update; it loads the last whole version.",
)
CONTINUED = counter(
    "forge_inference_tensorrt_llm_continued_requests_total",
    "Requests that were read again from their tokens so far, by reason: update (the weights "
    "changed), version (the hand-off is of other weights), kind (it is of another engine), lost "
    "(its keys and values did not arrive).",
    ["reason"],
)
CACHE_GAPS = counter(
    "forge_inference_tensorrt_llm_cache_gaps_total",
    "Gaps in the library's cache events; all cached blocks are then reported again.",
)
STATISTIC = gauge(
    "forge_inference_tensorrt_llm_statistic",
    "Numbers of the library's iteration statistics, by its own name for each.",
    ["name"],
)
