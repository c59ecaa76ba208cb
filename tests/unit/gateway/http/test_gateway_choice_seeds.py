"""Several answers to one prompt with the agent's seed: each has a seed of its own, in every
protocol that has both."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import aiohttp
import pytest

from services.gateway.conversation.turn_request import TurnRequest, choice_sampling
from services.gateway.turns.types import Piece, Turn
from tests.support.gateway.scripted_turns import ScriptedTurns, served

WAIT_S = 30.0
MODEL = "chatml-test"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "n": 3}
TWO_PROMPTS = {"model": MODEL, "prompt": ["a", "b"], "n": 2}
GEMINI: dict[str, Any] = {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]}


class NotedTurns(ScriptedTurns):
    """Notes the seeds that the router gets."""

    def __init__(self) -> None:
        super().__init__()
        self.script = ["so"]
        self.seeds: list[int | None] = []

    async def run_turn(self, session: Any, request: TurnRequest) -> AsyncGenerator[Piece | Turn]:
        sampling = choice_sampling(request)
        self.seeds.append(sampling.seed if sampling.HasField("seed") else None)
        async for piece in super().run_turn(session, request):
            yield piece


async def seeds_of(path: str, body: dict[str, Any]) -> list[int | None]:
    turns = NotedTurns()
    async with served(turns) as url, aiohttp.ClientSession() as http, asyncio.timeout(WAIT_S):
        headers = {"Authorization": "Bearer k", "x-goog-api-key": "k"}
        async with http.post(f"{url}{path}", json=body, headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            await answer.read()
    return turns.seeds


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "offsets"),
    [
        ("chat/completions", CHAT, [0, 1, 2]),
        ("chat/completions", CHAT | {"n": 1}, [0]),
        # The answers to different prompts may have one seed, as in requests of their own.
        ("completions", TWO_PROMPTS, [0, 1, 0, 1]),
    ],
)
async def test_choices_have_consecutive_seeds(
    path: str, body: dict[str, Any], offsets: list[int], stream: bool
) -> None:
    """Also where the largest seed is followed by 0; without a seed each engine draws its own."""
    last = 2**64 - 2
    for seed in (7, last):
        found = await seeds_of(f"/v1/{path}", body | {"seed": seed, "stream": stream})
        assert found == [(seed + offset) % 2**64 for offset in offsets]
    assert set(await seeds_of(f"/v1/{path}", body | {"stream": stream})) == {None}


@pytest.mark.parametrize("method", ["generateContent", "streamGenerateContent"])
async def test_candidates_have_consecutive_seeds(method: str) -> None:
    """Google's name for choices."""
    body = GEMINI | {"generationConfig": {"seed": 7, "candidateCount": 3}}
    assert await seeds_of(f"/v1beta/models/{MODEL}:{method}", body) == [7, 8, 9]
