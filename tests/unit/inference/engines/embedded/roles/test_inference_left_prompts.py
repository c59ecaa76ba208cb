"""Prompts whose caller leaves at once."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from services.inference.engines.embedded.messages import Abort, Read
from tests.contract import engines
from tests.contract.engines import GREEDY, make_prompt, prompt_ids
from tests.support.runtime.waiting import until


async def test_prompt_that_its_caller_leaves_at_once_is_aborted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The actor has taken it. Without an abort it would compute a prompt whose caller has left."""
    engines.CONFIGS["qwen3"].save_pretrained(tmp_path)
    told: list[Any] = []
    async with engines.embedded(tmp_path) as pair:
        actor = SimpleNamespace(tell=told.append, alive=True)
        with monkeypatch.context() as patched:
            patched.setattr(pair.prefill, "_actor", actor)
            prompt = make_prompt(prompt_ids(9), GREEDY)
            reading = asyncio.create_task(pair.prefill.prefill(prompt, hold_s=60))
            await until(lambda: told)
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading
        read, *rest = told
        assert isinstance(read, Read)
        assert rest == [Abort(request_id=prompt.request_id)]
        assert pair.prefill.status().running == 0
