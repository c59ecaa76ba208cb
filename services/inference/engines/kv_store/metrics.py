"""Metrics of the KV store."""

from __future__ import annotations

from forge.runtime.telemetry import counter, gauge

BLOCKS = counter(
    "forge_inference_kv_store_blocks_total",
    "Blocks of the KV store, by outcome. Found: host, disk; not found: missing; stored: written; "
    "not stored: dropped (the queue of writes is full, or the directory's lock busy); removed: "
    "evicted; an error of the file system: failed; refused files: foreign, truncated, corrupt.",
    ["outcome"],
)
STORE_BYTES = gauge(
    "forge_inference_kv_store_bytes",
    "Size of the store's directory after this worker's last write.",
)
RECREATIONS = counter(
    "forge_inference_kv_store_recreations_total",
    "Times that this worker found the store's directory deleted and made it again.",
)
