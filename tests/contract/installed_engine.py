"""An engine of another package under contract, by the name of its entry point: FORGE_ENGINES=NAME.

In the role both if it has it, otherwise in separate roles.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from forge.runtime.actors.actor_system import ActorSystem
from services.inference.engines import registry
from services.inference.engines.capabilities import Capabilities
from tests.contract.engines import CONFIGS, Pair, make_options, save_tokenizer

NAME = os.environ.get("FORGE_ENGINES", "")


@asynccontextmanager
async def start(model_path: Path, **options: Any) -> AsyncIterator[Pair]:
    """The engine without weights, as a worker starts it."""
    provider, chosen = registry.get_engine(NAME), make_options(model_path, **options)
    systems = ActorSystem("contract"), ActorSystem("contract-decode")
    if hasattr(provider, "start_aggregated") or hasattr(provider, "start_both"):
        both = await registry.start_both(NAME, systems[0], chosen)
        pair = Pair(prefill=both, decode=both)
    else:
        pair = Pair(
            prefill=await registry.start_prefill(NAME, systems[0], chosen),
            decode=await registry.start_decode(NAME, systems[1], chosen),
        )
    try:
        yield pair
    finally:
        await pair.prefill.close()
        if not pair.is_one:
            await pair.decode.close()
        for system in systems:
            await system.stop()


def capabilities() -> Capabilities:
    """What the engine declares, once it has started: tests are chosen by it."""

    async def declared(folder: Path) -> Capabilities:
        async with start(folder) as pair:
            return pair.capabilities

    with TemporaryDirectory() as folder:
        CONFIGS["qwen3"].save_pretrained(folder)
        save_tokenizer(Path(folder))
        return asyncio.run(declared(Path(folder)))
