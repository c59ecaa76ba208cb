"""A request for what no engine of the cluster can do: a code that clients understand."""

from __future__ import annotations

from typing import Any

import anthropic
import openai
import pytest
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from forge.core.errors import UnsupportedByEngines
from forge.runtime.rpc.status import from_status, to_status, trailing_metadata
from tests.support.gateway.scripted_turns import ScriptedTurns, served

MODEL = "chatml-test"
REFUSED = UnsupportedByEngines("the engine least cannot serve sampling.min_tokens = 2")
ASK: Any = [{"role": "user", "content": "hi"}]


def test_refusal_keeps_its_class_over_grpc() -> None:
    """From the router to the gateway; another client finds INVALID_ARGUMENT."""
    code, details = to_status(REFUSED)
    assert code.name == "INVALID_ARGUMENT"
    arrived = from_status(code, details, dict(trailing_metadata(REFUSED)))
    assert type(arrived) is UnsupportedByEngines
    assert str(arrived) == str(REFUSED)


@pytest.mark.parametrize("stream", [False, True])
async def test_refusal_of_all_engines_is_a_bad_request(stream: bool) -> None:
    """Status 400, which no client retries, with OpenAI's code and in Anthropic's form; the message
    names engine and field."""
    turns = ScriptedTurns()
    turns.script = [REFUSED, REFUSED]
    async with served(turns) as url:
        with pytest.raises(openai.BadRequestError, match="least cannot serve") as caught:
            client = DefaultAsyncHttpxClient(trust_env=False)
            sdk = AsyncOpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0, http_client=client)
            await sdk.chat.completions.create(model=MODEL, messages=ASK, stream=stream)
        assert caught.value.code == "unsupported_parameter"
        other = anthropic.DefaultAsyncHttpxClient(trust_env=False)
        agent = anthropic.AsyncAnthropic(
            base_url=url, api_key="k", max_retries=0, http_client=other
        )
        with pytest.raises(anthropic.BadRequestError, match="least cannot serve") as refused:
            await agent.messages.create(model=MODEL, max_tokens=9, messages=ASK, stream=stream)
        assert refused.value.type == "invalid_request_error"
