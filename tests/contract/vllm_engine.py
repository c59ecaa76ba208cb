"""vLLM under contract. It starts once for all tests of a model: a start takes longer than a test.

Of the options a test chooses `dtype` alone; all others are those of `_SHARED`.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from forge.runtime.actors.actor_system import ActorSystem
from services.inference.engines.aggregated import Aggregated
from services.inference.engines.provider import EngineOptions
from services.inference.engines.vllm.abilities import CAPABILITIES as CAPABILITIES
from services.inference.engines.vllm.engine import VllmEngine
from tests.contract.engines import BLOCK_TOKENS, CONTEXT_TOKENS, Pair, save_tokenizer

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
_OWN: dict[str, Any] = {
    "dtype": "float32",
    "block_tokens": BLOCK_TOKENS,
    "kv_bytes": 16 << 20,
    "cache_bytes": 0,
    "max_running": 4,
    "request_timeout_s": 600.0,
}
_SHARED = _OWN | {"kv_bytes": 64 << 20, "pass_tokens": 64, "context_tokens": CONTEXT_TOKENS}
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


def own_options(model_path: Path, **changed: Any) -> EngineOptions:
    """Options of engines that a test starts by itself."""
    return EngineOptions(model_path=str(model_path), **(_OWN | changed))


@asynccontextmanager
async def started(
    folder: Path,
    config: PretrainedConfig,
    *starts: Callable[[ActorSystem, EngineOptions], Awaitable[Any]],
    **changed: Any,
) -> AsyncIterator[list[Any]]:
    """Engines of a test's own, one per start, of a model that is written to `folder`. The engine of
    the contract ends before."""
    await stop()
    config.save_pretrained(folder)
    save_tokenizer(folder)
    options = own_options(folder, **changed)
    found = []
    async with AsyncExitStack() as stack:
        for number, start_one in enumerate(starts):
            system = ActorSystem(f"own-{number}")
            stack.push_async_callback(system.stop)
            found.append(await start_one(system, options))
            stack.push_async_callback(found[-1].close)
        yield found


async def _start(model_path: Path, dtype: str) -> tuple[VllmEngine, ActorSystem]:
    system = ActorSystem("contract-vllm")
    chosen = EngineOptions(model_path=str(model_path), **(_SHARED | {"dtype": dtype}))
    return await VllmEngine.start(system, chosen), system
