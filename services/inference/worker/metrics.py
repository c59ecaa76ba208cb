"""Metrics of a prefill or decode instance."""

from __future__ import annotations

from forge.runtime.telemetry import counter, gauge

HAND_OFFS = counter(
    "forge_inference_hand_offs_total",
    "Prompts whose keys and values decode fetched from another worker, by way: early (while "
    "prefill computed them) or whole (afterwards).",
    ["way"],
)
STREAM_CALLS = counter(
    "forge_inference_worker_calls_total",
    "Prefill and decode calls on the streams of routers, by status code.",
    ["code"],
)
LANDING_BYTES = gauge(
    "forge_inference_landing_bytes",
    "Memory of the early hand-offs that are arriving.",
)
WEIGHT_VERSION = gauge("forge_inference_weight_version", "Version of the weights in service.")
ANNOUNCED_VERSION = gauge(
    "forge_inference_weight_announced_version",
    "Version of the weights that this worker should serve: the newest announced, or a held one.",
)
FETCH_FAILURES = counter(
    "forge_inference_weight_fetch_failures_total",
    "Fetches of a weight version that failed at all sources; the worker retries.",
)
REFUSED_VERSIONS = counter(
    "forge_inference_weights_refused_total",
    "Complete versions that the engine refused, because their outputs are not finite or differ "
    "from the trainer's; the version before stays in service.",
)
SOURCES_GIVEN_UP = counter(
    "forge_inference_weight_sources_given_up_total",
    "Sources of weights that failed or sent nothing; the worker tries the next one.",
)
INTERRUPTED_FETCHES = counter(
    "forge_inference_weight_fetches_interrupted_total",
    "Fetches of weights that the worker ended for a newer version.",
)
WIRE_BYTES = counter(
    "forge_inference_weight_wire_bytes_total",
    "Bytes of tensors received for complete versions; a delta counts with its own size.",
)
VERSIONS = counter(
    "forge_inference_weight_versions_total",
    "Complete versions received, by way: bulk (bytes over TCP), grpc, group (a broadcast of "
    "torch.distributed), memory (shared by the processes of a host) or directory.",
    ["way"],
)
GROUP_FALLBACKS = counter(
    "forge_inference_weight_group_fallbacks_total",
    "Versions that the worker fetched, in whole or in part, in place of its group, by reason: "
    "not_ready (its process for groups), refused (late, or no group formed), failed, damaged.",
    ["reason"],
)
WEIGHT_FILES_REFUSED = counter(
    "forge_inference_weight_files_refused_total",
    "Announced weight files that were missing, damaged or another user's; the worker then fetched "
    "the version over gRPC.",
    ["way"],
)
BROKEN_ANSWERS = counter(
    "forge_inference_broken_answers_total",
    "Answers that ended with a log-prob that is not finite.",
)
BROKEN_OUTPUTS = counter(
    "forge_inference_broken_outputs_total",
    "Answers that the worker refused, since its engine returned an id outside the model's "
    "vocabulary.",
)
REFUSED_DELTAS = counter(
    "forge_inference_weight_deltas_refused_total",
    "Damaged deltas; the worker then fetched the rest of the version without deltas.",
)
