"""Fuzz targets: bodies of the gateway's HTTP requests. Each is understood, or refused with 400."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from forge.core.errors import InvalidArgument
from services.gateway.conversation.agent_time import Moment
from services.gateway.http import control
from services.gateway.http.anthropic import schema as anthropic_schema
from services.gateway.http.anthropic.history import messages_of as anthropic_messages
from services.gateway.http.edge import json_response
from services.gateway.http.message_parts.images import placeholder
from services.gateway.http.openai.completions import chat_schema, guided
from services.gateway.http.openai.fields import CHAT as CHAT_FIELDS
from services.gateway.http.openai.fields import RESPONSES as RESPONSES_FIELDS
from services.gateway.http.openai.responses import schema as responses_schema
from services.gateway.http.openai.responses.history import history_of
from services.gateway.http.openai.responses.turn import head_and_turn
from services.gateway.http.request_fields import request_body
from services.gateway.http.request_fields.parameters import decode_request
from services.gateway.http.request_fields.request_body import checked_stops
from tests.support.gateway.chat_templates import make_model
from tests.support.suite.damaged import damaged_json

MODEL = make_model("chatml")
NOW = Moment.now()
SCHEMA = {"type": "object", "properties": {"at": {"type": "string"}}}
FUNCTION = {"name": "look", "description": "Look.", "parameters": SCHEMA, "strict": True}
SAMPLING = {"temperature": 0.5, "top_p": 0.9, "stream": True}
TEXT_PART = {"type": "text", "text": "hi"}

CHAT = SAMPLING | {
    "model": "policy",
    "messages": [
        {"role": "system", "content": [TEXT_PART]},
        {"role": "user", "content": "hi", "name": "me"},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "hm",
            "tool_calls": [{"id": "x", "function": {"name": "look", "arguments": '{"at": "a"}'}}],
        },
        {"role": "tool", "content": "there", "tool_call_id": "x"},
    ],
    "tools": [{"type": "function", "function": FUNCTION}],
    "tool_choice": {"function": {"name": "look"}},
    "n": 2,
    "seed": 5,
    "top_k": 4,
    "max_tokens": 10,
    "max_completion_tokens": 7,
    "stop": ["x"],
    "logprobs": True,
    "top_logprobs": 3,
    "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
    "stream_options": {"include_usage": True},
    "parallel_tool_calls": True,
    "modalities": ["text"],
    "min_tokens": 2,
    "stop_token_ids": [3],
    "chat_template_kwargs": {"enable_thinking": True},
    "reasoning_effort": "low",
    "continue_final_message": False,
    "return_token_ids": True,
    "best_of": 1,
    "frequency_penalty": 0.5,
}
RESPONSES = SAMPLING | {
    "model": "policy",
    "instructions": "Be brief.",
    "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "x", "name": "look", "arguments": "{}", "id": "fc_1"},
        {"type": "function_call_output", "call_id": "x", "output": "there"},
    ],
    "tools": [{"type": "function"} | FUNCTION],
    "tool_choice": {"type": "function", "name": "look"},
    "max_output_tokens": 10,
    "max_tool_calls": 3,
    "top_logprobs": 2,
    "include": ["message.output_text.logprobs"],
    "metadata": {"run": "1"},
    "text": {"format": {"type": "json_schema", "schema": SCHEMA, "strict": True}},
    "reasoning": {"effort": "low"},
    "truncation": "disabled",
    "prompt_cache_key": "k",
    "store": True,
}
ANTHROPIC = SAMPLING | {
    "model": "policy",
    "max_tokens": 10,
    "system": [TEXT_PART],
    "messages": [
        {"role": "user", "content": [TEXT_PART]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "tool_use", "id": "x", "name": "look", "input": {"at": "a"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "x",
                    "content": [TEXT_PART],
                    "is_error": True,
                }
            ],
        },
    ],
    "tools": [{"name": "look", "description": "Look.", "input_schema": SCHEMA, "strict": True}],
    "tool_choice": {"type": "tool", "name": "look", "disable_parallel_tool_use": True},
    "top_k": 4,
    "stop_sequences": ["x"],
    "thinking": {"type": "enabled", "display": "omitted"},
    "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
    "context_management": {"edits": [{"type": "clear_thinking_1"}]},
}
CLOSE = {
    "rewards": [
        {"name": "exact", "value": 1.0, "kind": "outcome", "turn_index": 2, "event_id": "e"}
    ],
    "abandon_reason": "stuck",
    "min_turns": 1,
    "after_agent_s": 0.5,
}


def understood(read: Callable[[], Any]) -> None:
    """Reads a request, which may be refused with 400."""
    try:
        read()
    except InvalidArgument as error:
        assert str(error)


@given(damaged_json(CHAT))
def test_chat_completions(body: bytes) -> None:
    """Any body is understood or refused."""

    def read() -> None:
        request, headers = decode_request(body, chat_schema.ChatCompletionRequest, CHAT_FIELDS)
        chat_schema.sampling_of(request).SerializeToString()
        chat_schema.required_tool(request, MODEL.format)
        checked_stops("stop", request.stop)
        chat_schema.choices_of(request)
        messages = chat_schema.messages_of(request, placeholder)
        list(chat_schema.prefill_of(request, messages)[0])
        asked = chat_schema.template_kwargs_of(request, MODEL.template_variables, headers)
        MODEL.template_kwargs("", asked)

    understood(read)


@given(damaged_json(RESPONSES))
def test_responses(body: bytes) -> None:
    """Any body is understood or refused; the response can repeat the fields it repeats."""

    def read() -> None:
        request, headers = decode_request(body, responses_schema.ResponsesRequest, RESPONSES_FIELDS)
        head, turn = head_and_turn(request, MODEL, NOW, headers)
        turn.sampling.SerializeToString()
        list(history_of(bytes(request.input), request.instructions))
        json_response(head.response("completed", [], usage={}))

    understood(read)


@given(damaged_json(ANTHROPIC))
def test_anthropic_messages(body: bytes) -> None:
    """Any body is understood or refused."""

    def read() -> None:
        request = request_body.decode(body, anthropic_schema.MessagesRequest)
        anthropic_schema.sampling_of(request).SerializeToString()
        anthropic_schema.check(request)
        anthropic_schema.shown_of(request)
        tools = anthropic_schema.tools_of(request)
        anthropic_schema.required_tool(request, tools, MODEL.format)
        anthropic_schema.stops_of(request)
        for message in anthropic_messages(request):
            message.content.encode()

    understood(read)


@given(damaged_json(CLOSE))
def test_close(body: bytes) -> None:
    """Any body is understood or refused."""
    understood(lambda: control.rewards_of(request_body.decode(body, control.CloseRequest)))


@given(st.text() | st.text(alphabet=':=|()[]"/ \n*+?rootsa'))
def test_guided_grammars(text: str) -> None:
    """Any text is a grammar in Lark or GBNF, or refused."""
    understood(lambda: guided._lark("guided_grammar", text))
