"""Settings of bulk connections, equal at the trainer and at workers."""

from __future__ import annotations

from dataclasses import dataclass

from forge.runtime.settings.service_config import Port


@dataclass(frozen=True, slots=True, kw_only=True)
class BulkSettings:
    """TCP connections for the bytes of weights, beside gRPC."""

    enabled: bool = True
    """Send and fetch the bytes of weights over TCP, with the TLS of gRPC; off: over gRPC alone."""
    port: Port = 0
    """Port of these connections, on the address of host; 0 takes a free one. Ranks of a trainer add
    their number on the host. A worker that cannot reach it fetches over gRPC."""
