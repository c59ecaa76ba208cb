"""A prompt beyond the context: the words and codes by which clients find this error and compact."""

from __future__ import annotations

import re

import anthropic
import openai
import pytest
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from forge.core.errors import ContextTooLong
from forge.runtime.rpc.status import from_status, to_status, trailing_metadata
from tests.support.gateway.scripted_turns import ScriptedTurns, served

MODEL = "chatml-test"
TOO_LONG = ContextTooLong.of(tokens=5000, limit=4096)
CLIENTS_WORDS = (
    # Anthropic's own words, with the numbers that Claude Code reads.
    r"^prompt is too long[^0-9]*5000\s*tokens?\s*>\s*4095 maximum",
    # OpenAI's words in chat completions; LiteLLM compares them in lower case.
    r"this model's maximum context length is 4096 tokens",
    r"maximum context length is 4096 tokens[\s\S]*?resulted in 5000 tokens",
    r"reduce the length of the messages",
    # OpenAI's words in responses.
    r"exceeds the context window",
)


def sdk(url: str) -> AsyncOpenAI:
    client = DefaultAsyncHttpxClient(trust_env=False)
    return AsyncOpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0, http_client=client)


@pytest.mark.parametrize("words", CLIENTS_WORDS)
def test_overflow_message_has_the_words_of_each_protocol(words: str) -> None:
    """One message for all, since agents meet it behind any proxy."""
    assert re.search(words, str(TOO_LONG), re.IGNORECASE)


def test_overflow_message_names_a_lower_bound_and_a_domain_limit() -> None:
    """A huge text is refused uncounted; a domain's limit is not the model's."""
    error = ContextTooLong.of(tokens=5000, limit=64, at_least=True, domain="code")
    assert "5000 tokens > 63 maximum (at least)" in str(error)
    assert "is 64 tokens, answer included, as set for domain code" in str(error)


def test_overflow_keeps_its_class_over_grpc() -> None:
    """A white-box agent catches the class, and others find the words."""
    code, details = to_status(TOO_LONG)
    arrived = from_status(code, details, dict(trailing_metadata(TOO_LONG)))
    assert type(arrived) is ContextTooLong
    assert str(arrived) == str(TOO_LONG)


@pytest.mark.parametrize("stream", [False, True])
async def test_chat_completions_have_openais_code(stream: bool) -> None:
    """Status 400 with the code, also of a stream, which has not begun."""
    turns = ScriptedTurns()
    turns.script = [TOO_LONG]
    async with served(turns) as url:
        with pytest.raises(openai.BadRequestError) as caught:
            await sdk(url).chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "hi"}], stream=stream
            )
    assert (caught.value.code, caught.value.body) == (
        "context_length_exceeded",
        {
            "message": str(TOO_LONG),
            "type": "invalid_request_error",
            "param": "messages",
            "code": "context_length_exceeded",
        },
    )


async def test_a_whole_response_has_the_same_error() -> None:
    """Status 400 with the code."""
    turns = ScriptedTurns()
    turns.script = [TOO_LONG]
    async with served(turns) as url:
        with pytest.raises(openai.BadRequestError) as caught:
            await sdk(url).responses.create(model=MODEL, input="hi")
    assert caught.value.code == "context_length_exceeded"


async def test_a_streamed_response_fails_with_the_code() -> None:
    """As from OpenAI's API, the stream begins, and its last event is `response.failed`: agents read
    the code there. The SDK raises the `error` event before."""
    turns = ScriptedTurns()
    turns.script = [TOO_LONG]
    async with served(turns) as url:
        raw = await sdk(url).responses.with_raw_response.create(
            model=MODEL, input="hi", stream=True
        )
        body = (await raw.http_response.aread()).decode()
        with pytest.raises(openai.APIError) as caught:
            async for _ in await sdk(url).responses.create(model=MODEL, input="hi", stream=True):
                pass
    names = re.findall(r"^event: (.*)$", body, re.MULTILINE)
    assert names == ["response.created", "response.in_progress", "error", "response.failed"]
    assert '"error":{"code":"context_length_exceeded","message":"prompt is too long' in body
    assert '"param":"input"' in body
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize("stream", [False, True])
async def test_messages_have_anthropics_words(stream: bool) -> None:
    """An `invalid_request_error` whose message begins as clients expect it."""
    turns = ScriptedTurns()
    turns.script = [TOO_LONG]
    client = anthropic.DefaultAsyncHttpxClient(trust_env=False)
    async with served(turns) as url:
        agent = anthropic.AsyncAnthropic(
            base_url=url, api_key="k", max_retries=0, http_client=client
        )
        with pytest.raises(anthropic.BadRequestError) as caught:
            await agent.messages.create(
                model=MODEL,
                max_tokens=9,
                messages=[{"role": "user", "content": "hi"}],
                stream=stream,
            )
    assert caught.value.type == "invalid_request_error"
    assert "prompt is too long: 5000 tokens > 4095 maximum" in caught.value.message
