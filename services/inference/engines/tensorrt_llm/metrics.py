"""Metrics of the TensorRT-LLM engine."""

from __future__ import annotations

from forge.runtime.telemetry import counter, gauge

RESTARTS = counter(
    "forge_inference_tensorrt_llm_restarts_total",
    "Starts of the library's engine after a failed update; it loads the last whole version.",
)
CONTINUED = counter(
    "forge_inference_tensorrt_llm_continued_requests_total",
    "Requests whose prompt and tokens so far were computed again, by reason: update (the weights "
    "changed), version (the hand-off has another version), kind (the hand-off is of another "
    "engine), lost (its keys and values did not arrive).",
    ["reason"],
)
CACHE_GAPS = counter(
    "forge_inference_tensorrt_llm_cache_gaps_total",
    "Gaps in the library's cache events. After a gap the worker reports all cached blocks again.",
)
STATISTIC = gauge(
    "forge_inference_tensorrt_llm_statistic",
    "Values of the library's iteration statistics, by the library's names.",
    ["name"],
)
STAGED_BYTES = gauge(
    "forge_inference_tensorrt_llm_staged_bytes",
    "Bytes of new weights in tensorrt_llm.update_dir, on their way to the GPUs.",
)
