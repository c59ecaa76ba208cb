"""Reads the library's cache events and statistics, until cancelled."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from typing import Any

from forge.core.errors import Unavailable
from forge.runtime.telemetry import log
from services.inference.engines.tensorrt_llm.cache_events import CacheEvents
from services.inference.engines.tensorrt_llm.llm import Llm
from services.inference.engines.tensorrt_llm.metrics import CACHE_GAPS, STATISTIC

_WAIT_S = 2.0
_PAUSE_S = 1.0
_MOST_NAMES = 64


async def watch_cache(llm: Llm, cache: CacheEvents) -> None:
    """Follow the events. A failed read begins again, as a gap does."""
    while True:
        gaps = cache.gaps
        try:
            async for event in llm.engine.get_kv_cache_events_async(timeout=_WAIT_S):
                cache.apply(event)
        except Unavailable:
            cache.restarted()
            await asyncio.sleep(_PAUSE_S)
        except Exception as error:  # Whatever the library raises, requests go on.
            log.warning("tensorrt_llm_cache_events_failed", error=f"{error}")
            cache.restarted()
            await asyncio.sleep(_PAUSE_S)
        CACHE_GAPS.inc(cache.gaps - gaps)


async def watch_statistics(llm: Llm) -> None:
    """Keep the newest numbers in metrics."""
    while True:
        try:
            async for found in llm.engine.get_stats_async(timeout=_WAIT_S):
                for name, value in numbers(found).items():
                    STATISTIC.labels(name).set(value)
        except Unavailable:
            pass
        except Exception as error:  # Whatever the library raises, requests go on.
            log.warning("tensorrt_llm_statistics_failed", error=f"{error}")
        await asyncio.sleep(_PAUSE_S)


def numbers(found: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Return the numbers of nested statistics, at most 64, by dotted name."""
    flat: dict[str, float] = {}
    for key, value in found.items():
        if isinstance(value, Mapping):
            flat |= numbers(value, f"{prefix}{key}.")
        elif isinstance(value, int | float) and math.isfinite(value):
            flat[f"{prefix}{key}"] = float(value)
    return dict(list(flat.items())[:_MOST_NAMES])
