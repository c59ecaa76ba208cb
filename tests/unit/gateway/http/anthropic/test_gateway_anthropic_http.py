"""Anthropic's Messages API over HTTP, as its SDK sees it, with scripted turns behind it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import anthropic
import pytest
import pytest_asyncio
from anthropic import AsyncAnthropic, DefaultAsyncHttpxClient

from forge.core.errors import ContextTooLong, DataLoss, ResourceExhausted, Unavailable
from services.gateway.http.anthropic import messages
from tests.support.gateway.scripted_turns import ScriptedTurns, served

ASK: dict[str, Any] = {
    "model": "chatml-test",
    "max_tokens": 10,
    "messages": [{"role": "user", "content": "hi"}],
}
MAX_BODY_BYTES = 5000


@pytest.fixture
def turns() -> ScriptedTurns:
    return ScriptedTurns()


@pytest_asyncio.fixture
async def url(turns: ScriptedTurns) -> AsyncIterator[str]:
    async with served(turns, max_body_bytes=MAX_BODY_BYTES) as address:
        yield address


def sdk(url: str, *, max_retries: int = 0) -> AsyncAnthropic:
    client = DefaultAsyncHttpxClient(trust_env=False)
    return AsyncAnthropic(base_url=url, api_key="k", max_retries=max_retries, http_client=client)


@pytest.mark.parametrize(
    ("error", "raised", "kind", "retry_after"),
    [
        (
            ResourceExhausted("many", retry_after_s=2.0),
            anthropic.RateLimitError,
            "rate_limit_error",
            "2",
        ),
        (Unavailable("away"), anthropic.ServiceUnavailableError, "overloaded_error", "1"),
        (DataLoss("broken"), anthropic.InternalServerError, "api_error", None),
        (KeyError("a bug"), anthropic.InternalServerError, "api_error", None),
        (ContextTooLong("9 > 8"), anthropic.BadRequestError, "invalid_request_error", None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_errors_before_the_answer_have_their_status(
    url: str,
    turns: ScriptedTurns,
    error: Exception,
    raised: type[anthropic.APIStatusError],
    kind: str,
    retry_after: str | None,
    stream: bool,
) -> None:
    """Streamed or not, nothing is sent before the first token."""
    turns.script = [error]
    with pytest.raises(raised) as caught:
        await sdk(url).messages.create(stream=stream, **ASK)
    assert caught.value.type == kind
    assert caught.value.response.headers.get("retry-after") == retry_after
    assert caught.value.request_id


async def test_prompt_beyond_the_context_has_anthropics_error_text(
    url: str, turns: ScriptedTurns
) -> None:
    """Clients that compact their history search for these words."""
    turns.script = [ContextTooLong.of(tokens=9, limit=9)]
    with pytest.raises(anthropic.BadRequestError) as caught:
        await sdk(url).messages.create(**ASK)
    assert caught.value.body == {
        "type": "error",
        "error": {"type": "invalid_request_error", "message": str(turns.script[0])},
        "request_id": caught.value.request_id,
    }
    assert str(turns.script[0]).startswith("prompt is too long: 9 tokens > 8 maximum")


async def test_sdk_repeats_retryable_errors(url: str, turns: ScriptedTurns) -> None:
    """503 is repeated; an engine's invalid answer is not, although it is a 500."""
    turns.script = [Unavailable("away", retry_after_s=0.001)]
    with pytest.raises(anthropic.ServiceUnavailableError):
        await sdk(url, max_retries=2).messages.create(**ASK)
    assert turns.runs == 3
    turns.script = [DataLoss("broken")]
    with pytest.raises(anthropic.InternalServerError):
        await sdk(url, max_retries=2).messages.create(**ASK)
    assert turns.runs == 4


async def test_errors_in_mid_stream_are_events(url: str, turns: ScriptedTurns) -> None:
    """The text sent before stays; the SDK raises the error of the event."""
    turns.script = ["so ", "far", Unavailable("the router is gone")]
    said = ""
    with pytest.raises(anthropic.APIStatusError, match="the router is gone") as caught:
        async with sdk(url).messages.stream(**ASK) as stream:
            async for text in stream.text_stream:
                said += text
    assert said == "so far"
    assert caught.value.type == "overloaded_error"


async def test_a_long_silence_has_pings(
    url: str, turns: ScriptedTurns, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While tokens arrive without an event, pings show that the stream is alive."""
    monkeypatch.setattr(messages, "PING_EVERY_S", 0.0)
    turns.script = ["a", "", "", "b"]
    async with aiohttp.ClientSession() as http:
        headers = {"x-api-key": "k"}
        async with http.post(
            f"{url}/v1/messages", json=ASK | {"stream": True}, headers=headers
        ) as r:
            events = [line[7:] for line in (await r.text()).splitlines() if line[:6] == "event:"]
    assert events[:2] == ["message_start", "ping"]
    assert events.count("ping") == 3


async def test_errors_before_any_handler_have_the_protocols_shape(url: str) -> None:
    """Bodies that are too large, and unknown paths."""
    with pytest.raises(anthropic.ContentTooLargeError) as large:
        await sdk(url).messages.create(**(ASK | {"system": "x" * MAX_BODY_BYTES}))
    assert large.value.body["error"]["type"] == "request_too_large"  # type: ignore[index]
    with pytest.raises(anthropic.NotFoundError) as unknown:
        await sdk(url).messages.batches.list()
    assert unknown.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    async with aiohttp.ClientSession() as http, http.get(f"{url}/v1/messages") as got:
        assert (got.status, (await got.json())["type"]) == (405, "error")
    async with aiohttp.ClientSession() as http, http.get(f"{url}/v1/chat/completions") as got:
        kind = (await got.json())["error"]["type"]
        assert (got.status, kind) == (405, "invalid_request_error")
    async with aiohttp.ClientSession() as http, http.get(f"{url}/v1/nothing") as got:
        assert (got.status, "type" in await got.json()) == (404, False)
