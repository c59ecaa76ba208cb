"""Exports the spans of a service process, from its start to its stop."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

from forge.core.extras import require_extra
from forge.runtime.settings import ServiceConfig
from forge.runtime.tracing import begin_tracing


def export_spans(service: str, config: ServiceConfig, undo: AsyncExitStack) -> None:
    """Begin if a collector is set. Raises ConfigError without the extra, and for its address."""
    tracing = config.tracing
    if not tracing.endpoint:
        return
    require_tracing(config)
    stop = begin_tracing(
        service,
        config.instance_id,
        cluster=config.cluster,
        endpoint=tracing.endpoint,
        sample_ratio=tracing.sample_ratio,
        queue_spans=tracing.queue_spans,
    )
    # On a thread: it waits for the collector.
    undo.push_async_callback(asyncio.to_thread, stop)


def require_tracing(config: ServiceConfig) -> None:
    """Raises ConfigError if a collector is set and the extra is missing."""
    if config.tracing.endpoint:
        require_extra("tracing")
