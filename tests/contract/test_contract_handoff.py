"""Keys and values that do not fit the request, or were damaged on their way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.inference.engines.base import KvSpan, Prompt, RefusedHandOff
from tests.contract import engines
from tests.contract.engines import GREEDY, Pair, prompt_ids, published, reference
from tests.support.inference.transformers_answers import greedy_of


def _fewer_tokens(span: KvSpan) -> KvSpan:
    layers, two, heads, tokens, size = span.shape
    shape = (layers, two, heads, tokens - 1, size)
    data = bytes(span.data)[: len(span.data) // tokens * (tokens - 1)]
    return replace(span, tokens=tokens - 1, shape=shape, data=data)


def _other_heads(span: KvSpan) -> KvSpan:
    layers, two, heads, tokens, size = span.shape
    return replace(span, shape=(layers, two, 2 * heads, tokens, size // 2))


WRONG: dict[str, Callable[[KvSpan], KvSpan]] = {
    "another place": lambda span: replace(span, from_token=span.from_token + 8),
    "fewer tokens": _fewer_tokens,
    "other heads": _other_heads,
    "another type": lambda span: replace(span, dtype="int32"),
    "an unknown type": lambda span: replace(span, dtype="float8"),
    "another model": lambda span: replace(span, fingerprint=b"another"),
    "missing bytes": lambda span: replace(span, data=bytes(span.data)[:-4]),
}


@pytest.mark.parametrize("engine", engines.SEPARATE)
async def test_handoff_of_another_shape_is_refused(engine: str, tmp_path: Path) -> None:
    """The request gets an error that moves it; the engine serves the next one, and has cached
    nothing of it."""
    model = reference("qwen3")
    engines.CONFIGS["qwen3"].save_pretrained(tmp_path)
    ids = prompt_ids(60)
    async with engines.SEPARATE[engine](tmp_path) as pair:
        await pair.load(published(model), version=1)
        for name, damage in WRONG.items():
            with pytest.raises(RefusedHandOff):
                await _sample(pair, ids, damage)
            assert pair.decode.status().running == 0, name
        answer = await pair.sample(ids)
        assert answer.fetched_tokens == 60
        assert answer.ids == greedy_of(model, ids, 16)


async def _sample(pair: Pair, ids: list[int], damage: Callable[[KvSpan], KvSpan]) -> None:
    prompt = Prompt(
        request_id="damaged", ids=np.asarray(ids, dtype="<i4").tobytes(), sampling=GREEDY
    )
    prefilled = await pair.prefill.prefill(prompt, hold_s=60)

    async def fetch_kv(from_token: int) -> Any:
        span = await pair.prefill.fetch_kv(prompt.request_id, from_token=from_token)
        pair.prefill.release(prompt.request_id)
        return damage(span)

    async for _ in pair.decode.decode(prompt, prefilled.first, fetch_kv, stream=False):
        pass
