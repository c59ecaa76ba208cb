"""`param` of OpenAI's error objects: the field that is wrong, by its place in the request."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import aiohttp
import pytest

from forge.core.errors import ContextTooLong
from services.gateway.errors import InvalidField, ModelNotAllowed, UnknownPreviousResponse
from services.gateway.http.errors import Failure, openai_error
from services.gateway.http.message_parts.images import refuse
from services.gateway.http.openai.completions import chat_schema
from services.gateway.turns.types import Piece, Turn
from tests.support.gateway.scripted_turns import ScriptedTurns, served

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
ASK = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "look"}}
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: start"}


class ReadTurns(ScriptedTurns):
    """Reads the messages of each request, as a session does."""

    async def run_turn(self, session: Any, request: Any) -> AsyncGenerator[Piece | Turn]:
        """As a scripted turn."""
        list(request.messages)
        async for piece in super().run_turn(session, request):
            yield piece


async def param_of(path: str, asked: dict[str, Any], *, turns: ScriptedTurns | None = None) -> Any:
    """Returns `param` of the refusal of a request."""
    turns = turns or ReadTurns()
    body = {"model": turns.model.name} | asked
    async with (
        served(turns) as url,
        aiohttp.ClientSession() as client,
        client.post(url + path, json=body, headers={"x-api-key": "k"}) as response,
    ):
        assert response.status in (400, 404), await response.text()
        return (await response.json())["error"]["param"]


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({}, "messages"),
        ({"messages": [ASK], "model": "other"}, "model"),
        ({"messages": [ASK], "temperature": 1000}, "temperature"),
        ({"messages": [ASK], "temperature": "warm"}, "temperature"),
        ({"messages": [ASK], "max_tokens": 0}, "max_tokens"),
        ({"messages": [ASK], "max_completion_tokens": 0}, "max_completion_tokens"),
        ({"messages": [ASK], "n": 1000}, "n"),
        ({"messages": [ASK], "stop": ["a"] * 99}, "stop"),
        ({"messages": [ASK], "stop_token_ids": [1, -1]}, "stop_token_ids[1]"),
        ({"messages": [ASK], "logit_bias": {"a": 1}}, "logit_bias"),
        ({"messages": [ASK], "logit_bias": {"7": 1000}}, "logit_bias[7]"),
        ({"messages": [ASK], "top_logprobs": 2}, "top_logprobs"),
        ({"messages": [ASK], "use_beam_search": True}, "use_beam_search"),
        ({"messages": [ASK], "functions": [{}]}, "functions"),
        ({"messages": [ASK], "modalities": ["audio"]}, "modalities"),
        ({"messages": [ASK], "echo": True}, "echo"),
        ({"messages": [ASK], "tools": [TOOL, {}]}, "tools[1]"),
        ({"messages": [ASK], "tools": [TOOL], "tool_choice": "some"}, "tool_choice"),
        ({"messages": [ASK], "tool_choice": "required"}, "tool_choice"),
        ({"messages": [ASK], "response_format": {"type": "json_schema"}}, "response_format"),
        ({"messages": [ASK], "guided_json": "{"}, "guided_json"),
        ({"messages": [ASK], "guided_choice": []}, "guided_choice"),
        ({"messages": [ASK], "structured_outputs": {"regx": "a"}}, "structured_outputs.regx"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [ASK, {"role": "user", "content": 3}]}, "messages[1].content"),
        ({"messages": [ASK, {"content": "hi"}]}, "messages[1].role"),
        ({"messages": [ASK, {"role": "judge", "content": ""}]}, "messages[1].role"),
        ({"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, "messages[0].content"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [ASK, ASK | {"function_call": "x"}]}, "messages[1].function_call"),
    ],
)
async def test_chat_names_the_field(asked: dict[str, Any], param: str) -> None:
    """Its own type, its value and the rules between fields."""
    assert await param_of(CHAT, asked) == param


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [1 << 30]}, "prompt"),
        ({"prompt": "a", "best_of": 3}, "best_of"),
        ({"prompt": "a", "logprobs": 99}, "logprobs"),
        ({"prompt": "a", "logprobs": 1, "echo": True}, "echo"),
    ],
)
async def test_completions_name_the_field(asked: dict[str, Any], param: str) -> None:
    """As chat completions do."""
    assert await param_of(COMPLETIONS, asked) == param


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": [ASK, 3]}, "input[1]"),
        ({"input": [{"role": "user", "content": [{"type": "audio"}]}]}, "input[0]"),
        ({"input": [ASK, {"role": "user", "content": 3}]}, "input[1].content"),
        ({"input": [ASK, {"type": "function_call", "name": "a"}]}, "input[1].call_id"),
        ({"input": [ASK, {"type": "dream"}]}, "input[1]"),
        ({"input": "a", "background": True}, "background"),
        ({"input": "a", "truncation": "auto"}, "truncation"),
        ({"input": "a", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "a", "metadata": {"a" * 99: ""}}, "metadata"),
        ({"input": "a", "text": {"format": {"type": "yaml"}}}, "text.format.type"),
        ({"input": "a", "text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"input": "a", "tool_choice": "some"}, "tool_choice"),
        ({"input": "a", "tools": [{"type": "dream"}]}, "tools[0]"),
        (
            {"input": "a", "tools": [{"type": "custom", "name": "a", "format": GRAMMAR}]},
            "tools[0].format.definition",
        ),
    ],
)
async def test_responses_name_the_field(asked: dict[str, Any], param: str) -> None:
    """Items by their number, as chat messages."""
    assert await param_of(RESPONSES, asked) == param


@pytest.mark.parametrize(
    ("path", "asked", "param"),
    [
        (CHAT, {"messages": [ASK]}, "messages"),
        (COMPLETIONS, {"prompt": "a"}, "prompt"),
        (RESPONSES, {"input": "a"}, "input"),
    ],
)
async def test_a_long_prompt_is_the_field_that_has_it(
    path: str, asked: dict[str, Any], param: str
) -> None:
    """Its error comes from the session, which knows no protocol."""
    turns = ReadTurns()
    turns.script = [ContextTooLong.of(tokens=90, limit=64)]
    assert await param_of(path, asked, turns=turns) == param


def test_errors_of_one_field_alone_name_it() -> None:
    """In every protocol of OpenAI."""
    named = [ModelNotAllowed("model 'a' is not for this session"), UnknownPreviousResponse("no")]
    params = [openai_error(Failure.of(error))["error"]["param"] for error in named]
    assert params == ["model", "previous_response_id"]


def test_a_new_message_has_its_number_in_the_whole_request() -> None:
    """Only the messages after a known prefix are decoded."""
    with pytest.raises(InvalidField, match=r"`\$\.messages\[3\]\.content`") as caught:
        chat_schema._read_messages(refuse, b'[{"role": "user", "content": 3}]', 3)
    assert caught.value.param == "messages[3].content"
