"""Metrics of a router."""

from __future__ import annotations

from forge.runtime.telemetry import counter, gauge

SAMPLED_TOKENS = counter("forge_inference_sampled_tokens_total", "Tokens sampled for callers.")
MOVED_REQUESTS = counter(
    "forge_inference_requests_moved_total",
    "Attempts that failed on a worker; the router then placed the request again.",
)
STARTED_OVER = counter(
    "forge_inference_requests_started_over_total",
    "Answers that no available engine could resume unchanged, by reason. Continued, with the "
    "tokens so far in the prompt: model = the engine has another model, draws = its draws differ "
    "for the request's seed, shares = it reports no shares of a reshaped distribution. Sampled "
    "again from the first token: grammar or penalties = no engine could resume their state.",
    ["reason"],
)
ENGINE_REQUESTS = counter(
    "forge_inference_engine_requests_total",
    "Prompts placed, by engine of the worker that computes them.",
    ["engine"],
)
OLDER_WEIGHTS = counter(
    "forge_inference_older_weights_total",
    "Answers placed on a worker with older weights than an earlier token's, after a wait of "
    "router.version_wait_s.",
)
EARLY_DECODES = counter(
    "forge_inference_early_decodes_total",
    "Decodes that began with the prefill of their prompt, by outcome: used = it sampled the "
    "answer, dropped = the caller left, or the prefill failed, ended the answer or swapped weights "
    "before, failed = the attempt continued without it.",
    ["outcome"],
)
QUEUED_REQUESTS = gauge("forge_inference_queued_requests", "Requests waiting in the router.")
STREAM_CALLS = counter(
    "forge_inference_stream_calls_total", "Sample calls on SampleStream, by status code.", ["code"]
)
CACHE_RESYNCS = counter(
    "forge_inference_cache_resyncs_total",
    "Streams of cache events that the router opened again after a loss or a gap.",
)
PLACED_PREFILLS = counter(
    "forge_inference_placed_prefills_total",
    "Prompts by the place of their prefill: local (the worker that samples), prefill (a prefill "
    "worker, with a hand-off).",
    ["place"],
)
