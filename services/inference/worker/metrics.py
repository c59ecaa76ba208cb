"""Metrics of a prefill or decode instance."""

from __future__ import annotations

from forge.runtime.telemetry import counter, gauge

HAND_OFFS = counter(
    "forge_inference_hand_offs_total",
    "Prompts whose keys and values decode has fetched from another worker, by way: early (while "
    "they were computed) or whole (afterwards).",
    ["way"],
)
STREAM_CALLS = counter(
    "forge_inference_worker_calls_total",
    "Prefills and decodes of routers on kept streams, by status code.",
    ["code"],
)
LANDING_BYTES = gauge(
    "forge_inference_landing_bytes",
    "Memory of prompts that arrive while they are computed.",
)
WEIGHT_VERSION = gauge("forge_inference_weight_version", "Version of the weights in service.")
ANNOUNCED_VERSION = gauge(
    "forge_inference_weight_announced_version",
    "Version of the weights that this worker is to serve: the newest announced, or a held one.",
)
FETCH_FAILURES = counter(
    "forge_inference_weight_fetch_failures_total", "Versions that no source could deliver."
)
REFUSED_VERSIONS = counter(
    "forge_inference_weights_refused_total",
    "Complete versions that the engine refused, because they compute no numbers or other ones; the "
    "version before stays in service.",
)
SOURCES_GIVEN_UP = counter(
    "forge_inference_weight_sources_given_up_total", "Sources that failed or sent nothing."
)
INTERRUPTED_FETCHES = counter(
    "forge_inference_weight_fetches_interrupted_total",
    "Fetches that gave way to a newer version.",
)
WIRE_BYTES = counter(
    "forge_inference_weight_wire_bytes_total",
    "Data of tensors received for complete versions, deltas as such.",
)
VERSIONS = counter(
    "forge_inference_weight_versions_total",
    "Complete versions by the way that they came: grpc, memory (shared by the processes of a host) "
    "or directory.",
    ["way"],
)
WEIGHT_FILES_REFUSED = counter(
    "forge_inference_weight_files_refused_total",
    "Announced files that were missing, damaged or not this user's; their version came by gRPC.",
    ["way"],
)
BROKEN_ANSWERS = counter(
    "forge_inference_broken_answers_total",
    "Answers that ended with a log-prob that is not finite.",
)
REFUSED_DELTAS = counter(
    "forge_inference_weight_deltas_refused_total",
    "Damaged deltas; the rest of their version was fetched whole.",
)
