"""`/detokenize`: the text of any number of ids, without a stop of the event loop."""

from __future__ import annotations

import asyncio

import aiohttp
from hypothesis import given
from hypothesis import strategies as st

from forge.core.token_columns import int32_array
from services.gateway.http.tokens import SLICE_TOKENS, text_of
from tests.support.gateway.chat_templates import make_model
from tests.support.gateway.scripted_turns import ScriptedTurns, served

MODEL = make_model("chatml")
LONG = "<|im_start|>user\nZoë 😀, " * SLICE_TOKENS


def ids_of(text: str) -> list[int]:
    return list(int32_array(MODEL.encode(text)))


async def test_other_requests_go_on_during_a_long_decode() -> None:
    """At least once for each slice."""
    ids = ids_of(LONG)
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    text = await text_of(MODEL, ids)
    counting.cancel()
    assert text == LONG
    assert turns >= len(ids) // SLICE_TOKENS > 4


@given(st.text(max_size=40).map(lambda text: text * 3))
def test_text_of_ids_has_every_character(text: str) -> None:
    """Also those that a slice would cut."""
    assert asyncio.run(text_of(MODEL, ids_of(text))) == text


async def test_detokenize_shows_special_tokens() -> None:
    """As text of the prompt."""
    asked = {"tokens": ids_of("<|im_start|>user\n")}
    headers = {"Authorization": "Bearer k"}
    async with (
        served(ScriptedTurns()) as url,
        aiohttp.ClientSession() as http,
        http.post(f"{url}/detokenize", json=asked, headers=headers) as answer,
    ):
        assert await answer.json() == {"prompt": "<|im_start|>user\n"}
