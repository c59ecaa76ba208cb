"""Bugs of the gateway as agents see them: an answer in the protocol's shape."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import openai
import pytest

from forge.core.errors import DataLoss, ForgeError, ResourceExhausted
from tests.support.gateway.scripted_turns import ScriptedTurns, served

INTERNAL = "internal error; the gateway's log has the cause"
WAIT_S = 30.0


async def completion(turns: ScriptedTurns, **fields: Any) -> tuple[int, str]:
    """Status and body."""
    asked = {"model": "chatml-test", "messages": [{"role": "user", "content": "hi"}], **fields}
    async with served(turns) as url, aiohttp.ClientSession() as http, asyncio.timeout(WAIT_S):
        headers = {"Authorization": "Bearer k"}
        async with http.post(f"{url}/v1/chat/completions", json=asked, headers=headers) as answer:
            return answer.status, await answer.text()


@pytest.mark.parametrize("error", [KeyError("secret"), DataLoss("broken")])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choices", [1, 2])
async def test_bug_before_the_answer_is_a_500(choices: int, stream: bool, error: Exception) -> None:
    """In the protocol's shape, for one choice and several, without the cause."""
    turns = ScriptedTurns()
    turns.script = [error]
    status, body = await completion(turns, n=choices, stream=stream)
    message = json.loads(body)["error"]["message"]
    assert status == 500
    assert message == ("broken" if isinstance(error, DataLoss) else INTERNAL)


@pytest.mark.parametrize("choices", [1, 2])
async def test_bug_in_mid_stream_is_an_event(choices: int) -> None:
    """Clients can parse the stream, and it ends."""
    turns = ScriptedTurns()
    turns.script = ["so ", "far", KeyError("secret")]
    status, body = await completion(turns, n=choices, stream=True)
    *said, last, _ = body.split("\n\n")
    assert status == 200
    assert all("error" not in json.loads(event.removeprefix("data: ")) for event in said)
    assert json.loads(last.removeprefix("data: "))["error"]["message"] == INTERNAL


@pytest.mark.parametrize(
    ("error", "code", "kind"),
    [
        (DataLoss("broken"), "server_error", "server_error"),
        (ResourceExhausted("full"), "rate_limit_exceeded", "rate_limit_error"),
    ],
)
async def test_sdk_raises_a_failure_in_mid_stream_of_a_response(
    error: ForgeError, code: str, kind: str
) -> None:
    """It takes `response.failed` for a regular end and raises `error` events alone."""
    turns = ScriptedTurns()
    turns.script = ["so ", "far", error]
    said = ""
    http = openai.DefaultAsyncHttpxClient(trust_env=False)
    async with served(turns) as url, asyncio.timeout(WAIT_S):
        agent = openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key="k", max_retries=0, http_client=http
        )
        with pytest.raises(openai.APIError, match=str(error)) as caught:
            async for event in await agent.responses.create(
                model="chatml-test", input="hi", stream=True
            ):
                said += event.delta if event.type == "response.output_text.delta" else ""
    assert said == "so far"
    assert (caught.value.code, caught.value.type) == (code, kind)
