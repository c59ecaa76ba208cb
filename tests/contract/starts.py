"""Starts of engines on the Qwen3-type model, for tests that have no need of another one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from tests.contract import engines
from tests.contract.engines import Pair, Start


class StartInFolder(Protocol):
    """Starts an engine on the Qwen3-type model of its folder, without weights."""

    def __call__(self, **options: Any) -> AbstractAsyncContextManager[Pair]: ...


def start_in(model_path: Path, start: Start) -> StartInFolder:
    """Save the model's configuration in the folder of a test."""
    engines.CONFIGS["qwen3"].save_pretrained(model_path)
    return partial(start, model_path)


@asynccontextmanager
async def serving(start: Start, model_path: Path, **options: Any) -> AsyncIterator[Pair]:
    """An engine with weights of the Qwen3-type model; one with a tokenizer finds it in the
    folder."""
    async with start_in(model_path, start)(**options) as pair:
        await pair.load(engines.published(engines.reference("qwen3")), version=1)
        yield pair
