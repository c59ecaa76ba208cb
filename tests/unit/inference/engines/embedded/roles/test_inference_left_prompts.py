"""Prompts whose caller leaves before the actor has confirmed them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from services.inference.engines.embedded.messages import Abort
from tests.contract import engines
from tests.contract.engines import GREEDY, make_prompt, prompt_ids


async def test_prompt_that_its_caller_leaves_at_once_is_aborted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The actor has taken it. Without an abort it would compute a prompt whose caller has left."""
    engines.CONFIGS["qwen3"].save_pretrained(tmp_path)
    asked, told = asyncio.Event(), list[Any]()

    async def ask(message: Any, *, timeout_s: float) -> None:
        asked.set()
        await asyncio.Event().wait()

    async with engines.embedded(tmp_path) as pair:
        actor = SimpleNamespace(ask=ask, tell=told.append, alive=True)
        with monkeypatch.context() as patched:
            patched.setattr(pair.prefill, "_actor", actor)
            prompt = make_prompt(prompt_ids(9), GREEDY)
            reading = asyncio.create_task(pair.prefill.prefill(prompt, hold_s=60))
            await asked.wait()
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading
        assert told == [Abort(request_id=prompt.request_id)]
        assert pair.prefill.status().running == 0
