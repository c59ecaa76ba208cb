"""Metrics of the KV store."""

from __future__ import annotations

from forge.runtime.telemetry import counter, gauge

BLOCKS = counter(
    "forge_inference_kv_store_blocks_total",
    "Blocks of the KV store, by outcome: host, disk and missing of reads; written, dropped (the "
    "queue of writes is full), failed and evicted of writes; foreign, truncated and corrupt of bad "
    "ones.",
    ["outcome"],
)
STORE_BYTES = gauge(
    "forge_inference_kv_store_bytes", "Size of the store's directory at its last reading."
)
