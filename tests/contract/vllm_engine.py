"""vLLM under contract. It starts once for all tests of a model: a start takes longer than a test.

Of the options a test chooses `dtype` alone; all others are those of `_SHARED`.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from forge.runtime.actors.actor_system import ActorSystem
from services.inference.engines.aggregated import Aggregated
from services.inference.engines.provider import EngineOptions
from services.inference.engines.vllm.abilities import CAPABILITIES as CAPABILITIES
from services.inference.engines.vllm.engine import VllmEngine
from tests.contract.engines import BLOCK_TOKENS, CONTEXT_TOKENS, Pair, save_tokenizer

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
_SHARED: dict[str, Any] = {
    "dtype": "float32",
    "block_tokens": BLOCK_TOKENS,
    "kv_bytes": 64 << 20,
    "cache_bytes": 0,
    "max_running": 4,
    "pass_tokens": 64,
    "context_tokens": CONTEXT_TOKENS,
    "request_timeout_s": 600.0,
}
_running: dict[str, tuple[VllmEngine, ActorSystem]] = {}
"""At most one: the machine's memory holds no two."""


@asynccontextmanager
async def start(model_path: Path, **options: Any) -> AsyncIterator[Pair]:
    """The engine on this model, as if it had no weights."""
    save_tokenizer(model_path)
    dtype = str(options.get("dtype", _SHARED["dtype"]))
    key = dtype + (model_path / "config.json").read_text()
    if key not in _running:
        await stop()
        _running[key] = await _start(model_path, dtype)
    vllm, _ = _running[key]
    vllm.version = 0
    engine = Aggregated(vllm)
    try:
        yield Pair(prefill=engine, decode=engine)
    finally:
        for request_id in list(engine._held):
            engine.release(request_id)
        await engine.idle()


async def stop() -> None:
    """End vLLM's process."""
    for engine, system in _running.values():
        await engine.close()
        await system.stop()
    _running.clear()


async def _start(model_path: Path, dtype: str) -> tuple[VllmEngine, ActorSystem]:
    system = ActorSystem("contract-vllm")
    chosen = EngineOptions(model_path=str(model_path), **(_SHARED | {"dtype": dtype}))
    return await VllmEngine.start(system, chosen), system
