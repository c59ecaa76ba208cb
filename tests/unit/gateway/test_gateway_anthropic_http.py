"""Anthropic's Messages API over HTTP, as its SDK sees it, with scripted turns behind it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import anthropic
import pytest
import pytest_asyncio
from aiohttp import web
from aiohttp.test_utils import TestServer
from anthropic import AsyncAnthropic, DefaultAsyncHttpxClient
from structlog.testing import capture_logs

from forge.core.errors import DataLoss, ResourceExhausted, Unavailable
from forge.core.formats import TextDelta
from forge.core.messages import Message
from forge.runtime.security import Claims
from forge.v1 import common_pb2
from services.gateway.conversation import Sampled
from services.gateway.http import anthropic_messages
from services.gateway.http.edge import Edge
from services.gateway.http.server import HttpServer
from services.gateway.turns import Piece, Turn, Turns
from tests.support.chat_templates import make_model

ASK: dict[str, Any] = {
    "model": "chatml-test",
    "max_tokens": 10,
    "messages": [{"role": "user", "content": "hi"}],
}
MAX_BODY_BYTES = 5000


class ScriptedTurns:
    """Gives what it is told to, in order: texts as pieces, errors as errors, then the turn."""

    model = make_model("chatml")
    whole = Turns.whole

    def __init__(self) -> None:
        self.script: Sequence[str | Exception] = ()
        self.runs = 0

    async def run(self, session: Any, request: Any) -> AsyncGenerator[Piece | Turn]:
        self.runs += 1
        for step in self.script:
            if isinstance(step, Exception):
                raise step
            deltas = [TextDelta(text=step)] if step else []
            yield Piece(deltas=deltas, tokens=common_pb2.SampledTokens(), prompt_tokens=5)
        message = Message(role="assistant", content="".join(map(str, self.script)))
        sampled = Sampled(
            ids=b"",
            logprobs=b"",
            weight_versions=b"",
            finish_reason=common_pb2.FINISH_REASON_STOP,
            answer=message,
        )
        yield Turn(
            turn_index=0,
            message=message,
            sampled=sampled,
            prompt_tokens=5,
            stop_text="",
            tokens=common_pb2.SampledTokens,
            token_logprobs=list,
        )


class AnySession:
    @asynccontextmanager
    async def use(self, claims: Any) -> AsyncIterator[Any]:
        yield SimpleNamespace(claims=claims)


@pytest.fixture
def turns() -> ScriptedTurns:
    return ScriptedTurns()


@pytest_asyncio.fixture
async def url(turns: ScriptedTurns) -> AsyncIterator[str]:
    claims = Claims(subject="s", scopes=frozenset({"session"}), trajectory_id="t:0:0")
    keyring = SimpleNamespace(verify=lambda token, now_s: claims)
    edge = Edge(
        turns=cast(Any, turns),
        sessions=cast(Any, AnySession()),
        pool=cast(Any, None),
        security=cast(Any, SimpleNamespace(keyring=keyring)),
        model_names=frozenset({turns.model.name}),
    )
    server = HttpServer(edge, max_body_bytes=MAX_BODY_BYTES)
    # Captured, as a traceback takes seconds to be printed well.
    with capture_logs():
        async with TestServer(cast(web.Application, server._runner.app)) as served:
            yield str(served.make_url("")).rstrip("/")


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
    """Streamed or not, nothing is sent until there is something to say."""
    turns.script = [error]
    with pytest.raises(raised) as caught:
        await sdk(url).messages.create(stream=stream, **ASK)
    assert caught.value.type == kind
    assert caught.value.response.headers.get("retry-after") == retry_after
    assert caught.value.request_id


async def test_what_may_succeed_later_is_repeated_by_the_sdk(
    url: str, turns: ScriptedTurns
) -> None:
    """503 is repeated, and an engine's broken answer is not, although it is a 500."""
    turns.script = [Unavailable("away", retry_after_s=0.001)]
    with pytest.raises(anthropic.ServiceUnavailableError):
        await sdk(url, max_retries=2).messages.create(**ASK)
    assert turns.runs == 3
    turns.script = [DataLoss("broken")]
    with pytest.raises(anthropic.InternalServerError):
        await sdk(url, max_retries=2).messages.create(**ASK)
    assert turns.runs == 4


async def test_errors_in_mid_stream_are_events(url: str, turns: ScriptedTurns) -> None:
    """The text sent before stays; the SDK raises what the event says."""
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
    """While tokens come that say nothing yet, the agent is told that the stream lives."""
    monkeypatch.setattr(anthropic_messages, "PING_EVERY_S", 0.0)
    turns.script = ["a", "", "", "b"]
    async with aiohttp.ClientSession() as http:
        headers = {"x-api-key": "k"}
        async with http.post(
            f"{url}/v1/messages", json=ASK | {"stream": True}, headers=headers
        ) as r:
            events = [line[7:] for line in (await r.text()).splitlines() if line[:6] == "event:"]
    assert events[:2] == ["message_start", "ping"]
    assert events.count("ping") == 3


async def test_what_no_handler_sees_has_the_shape_too(url: str) -> None:
    """Bodies that are too large, and paths that do not exist."""
    with pytest.raises(anthropic.ContentTooLargeError) as large:
        await sdk(url).messages.create(**(ASK | {"system": "x" * MAX_BODY_BYTES}))
    assert large.value.body["error"]["type"] == "request_too_large"  # type: ignore[index]
    with pytest.raises(anthropic.NotFoundError) as unknown:
        await sdk(url).messages.batches.list()
    assert unknown.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    async with aiohttp.ClientSession() as http, http.get(f"{url}/v1/messages") as got:
        assert (got.status, (await got.json())["type"]) == (405, "error")
    async with aiohttp.ClientSession() as http, http.get(f"{url}/v1/nothing") as got:
        assert (got.status, "type" in await got.json()) == (404, False)
