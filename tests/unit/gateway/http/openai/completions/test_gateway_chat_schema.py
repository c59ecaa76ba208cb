"""Requests from the wire: accepted or refused, for any bytes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forge.core.errors import ForgeError, InvalidArgument
from services.gateway.conversation.conversation import Conversation
from services.gateway.http.openai.completions import chat_schema
from services.gateway.http.request_fields import request_body
from services.gateway.http.request_fields.request_body import checked_stops
from tests.support.gateway.chat_templates import make_model

MODEL = make_model("chatml")
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=6,
)


def loosely(*likely: Any) -> st.SearchStrategy[Any]:
    """One of the values a client would send, or anything at all."""
    return st.one_of(st.sampled_from(likely), json_values)


functions = st.fixed_dictionaries(
    {},
    optional={
        "name": loosely("look"),
        "arguments": loosely("{}", {"a": "\ud83d"}, '{"a": "\\ud83d"}', "["),
    },
)
calls = st.fixed_dictionaries({}, optional={"id": loosely("x"), "function": functions})
messages = st.fixed_dictionaries(
    {},
    optional={
        "role": loosely("user", "assistant", "system", "tool", "developer"),
        "content": loosely("hi", "", None, [{"type": "text", "text": "hi"}]),
        "tool_calls": st.lists(calls, max_size=2) | json_values,
        "tool_call_id": loosely("x"),
        "name": loosely("me"),
        "reasoning_content": loosely("hm"),
    },
)
tools = st.fixed_dictionaries(
    {"type": st.just("function")},
    optional={
        "function": st.fixed_dictionaries(
            {}, optional={"name": loosely("look"), "parameters": loosely({"type": "object"})}
        )
    },
)
bodies = st.fixed_dictionaries(
    {"model": loosely("policy"), "messages": st.lists(messages, max_size=4) | json_values},
    optional={
        "tools": st.lists(tools, max_size=2) | json_values,
        "tool_choice": loosely("none", "auto", "required", {"function": {"name": "look"}}),
        "stop": loosely("x", ["x", ""]),
        "n": loosely(1, 2, 10**6),
        "temperature": loosely(0, 0.5, -1),
        "top_p": loosely(1, 0, 2),
        "top_k": loosely(-1, 5),
        "seed": loosely(-5, 2**70),
        "max_tokens": loosely(0, 5, 2**40),
        "max_completion_tokens": loosely(7),
        "logprobs": loosely(True),
        "top_logprobs": loosely(0, 3),
        "response_format": loosely({"type": "text"}, {"type": "json_object"}),
        "stream": loosely(True),
        "stream_options": loosely({"include_usage": True}),
        "parallel_tool_calls": loosely(True, False),
        "functions": loosely([], [{"name": "look"}]),
        "modalities": loosely(["text"], ["text", "audio"]),
    },
)


def understand(body: bytes) -> None:
    """Everything that is done with a request before it is sampled."""
    request = request_body.decode(body, chat_schema.ChatCompletionRequest)
    chat_schema.required_tool(request, MODEL.format)
    chat_schema.sampling_of(request).SerializeToString()
    checked_stops("stop", request.stop)
    chat_schema.choices_of(request)
    conversation = Conversation(model=MODEL)
    draft = conversation.draft(
        chat_schema.messages_of(request), chat_schema.tools_of(request.tools)
    )
    MODEL.encode(draft.text)


@given(bodies)
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_json_is_accepted_or_refused_with_a_forge_error(body: dict[str, Any]) -> None:
    """No body of any shape raises anything but an error of our own."""
    try:
        understand(json.dumps(body).encode())
    except ForgeError as error:
        assert error.http_status == 400


@given(st.binary(max_size=40))
def test_bytes_that_are_no_json_object_are_refused(body: bytes) -> None:
    """With that error."""
    with pytest.raises(InvalidArgument, match="not valid"):
        request_body.decode(body, chat_schema.ChatCompletionRequest)


@pytest.mark.parametrize("depth", [500, 900, 2000, 100_000])
def test_deeply_nested_tools_are_refused(depth: int) -> None:
    """By whichever layer finds it first."""
    deep = '{"a":' * depth + "1" + "}" * depth
    body = (
        '{"model": "policy", "messages": [{"role": "user", "content": "hi"}], "tools": '
        f'[{{"type": "function", "function": {{"name": "look", "parameters": {deep}}}}}]}}'
    )
    with pytest.raises(InvalidArgument):
        understand(body.encode())


def test_request_with_every_field_is_accepted() -> None:
    """Each field has its meaning."""
    request = request_body.decode(
        json.dumps(
            {
                "model": "policy",
                "messages": [
                    {"role": "developer", "content": [{"type": "text", "text": "Be brief."}]},
                    {"role": "user", "content": "hi", "name": "me"},
                    {
                        "role": "assistant",
                        "content": None,
                        "reasoning_content": "hm",
                        "tool_calls": [
                            {"id": "x", "type": "function", "function": {"name": "look"}}
                        ],
                    },
                    {"role": "tool", "tool_call_id": "x", "content": "done"},
                ],
                "max_tokens": 5,
                "max_completion_tokens": 7,
                "temperature": 0,
                "top_k": -1,
                "seed": -1,
                "stop": "END",
                "user": "ignored",
            }
        ).encode(),
        chat_schema.ChatCompletionRequest,
    )
    system, user, assistant, tool = chat_schema.messages_of(request)
    assert (system.role, system.content) == ("system", "Be brief.")
    assert user.name == "me"
    assert (assistant.content, assistant.reasoning) == ("", "hm")
    assert assistant.tool_calls[0].arguments == ""
    assert tool.tool_call_id == "x"
    sampling = chat_schema.sampling_of(request)
    assert (sampling.max_tokens, sampling.temperature, sampling.top_k) == (7, 0.0, 0)
    assert sampling.seed == 2**64 - 1
    assert sampling.HasField("temperature")
    assert not sampling.HasField("top_p")
    assert checked_stops("stop", request.stop) == ["END"]


CALL = {"id": "x", "type": "function", "function": {"name": "look"}}


@pytest.mark.parametrize("content", [{}, {"content": None}])
@pytest.mark.parametrize(
    ("message", "role"),
    [
        ({"role": "user"}, "user"),
        ({"role": "developer"}, "system"),
        ({"role": "tool", "tool_call_id": "x"}, "tool"),
        ({"role": "assistant", "tool_calls": []}, None),
        ({"role": "assistant", "tool_calls": [CALL]}, None),
        ({"role": "assistant", "reasoning_content": "hm"}, None),
    ],
)
def test_only_an_answer_lacks_content(
    message: dict[str, Any], content: dict[str, None], role: str | None
) -> None:
    """Agents send an empty one back as null. Others get 400, as at OpenAI's end."""
    body = {"model": "policy", "messages": [{"role": "user", "content": ""}, message | content]}
    request = request_body.decode(json.dumps(body).encode(), chat_schema.ChatCompletionRequest)
    if role is None:
        assert list(chat_schema.messages_of(request))[1].content == ""
        return
    said = rf"messages\[1\]: content is missing: a message of role {role} needs it"
    with pytest.raises(InvalidArgument, match=said):
        list(chat_schema.messages_of(request))


@pytest.mark.parametrize(
    ("choice", "required"),
    [
        ("auto", None),
        ("none", None),
        ("required", "look"),
        ({"type": "function", "function": {"name": "look"}}, "look"),
    ],
)
def test_tool_choice_is_mapped(choice: Any, required: str | None) -> None:
    """A single tool that is required is as good as named."""
    body = {
        "model": "policy",
        "messages": [],
        "tool_choice": choice,
        "tools": [{"type": "function", "function": {"name": "look"}}],
    }
    request = request_body.decode(json.dumps(body).encode(), chat_schema.ChatCompletionRequest)
    assert chat_schema.required_tool(request, MODEL.format) == required
    if required:
        with pytest.raises(InvalidArgument, match="plain"):
            chat_schema.required_tool(request, make_model("smollm2").format)


def test_default_fields_of_sdks_change_nothing() -> None:
    """Nulls, bookkeeping and hints come with every SDK."""
    answer: dict[str, Any] = {
        "role": "assistant",
        "content": "hm",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
        "tool_calls": None,
    }
    plain = {"role": "assistant", "content": "hm"}
    hints = {
        "frequency_penalty": 0,
        "logit_bias": None,
        "metadata": {"run": "7"},
        "modalities": ["text"],
        "parallel_tool_calls": True,
        "prediction": None,
        "prompt_cache_key": "k",
        "reasoning_effort": "high",
        "safety_identifier": "s",
        "service_tier": "auto",
        "store": False,
        "user": "me",
        "verbosity": "low",
    }
    read = [
        request_body.decode(json.dumps(body).encode(), chat_schema.ChatCompletionRequest)
        for body in (
            {"model": "policy", "messages": [plain]},
            {"model": "policy", "messages": [answer]} | hints,
        )
    ]
    one, other = [list(chat_schema.messages_of(request)) for request in read]
    assert one == other
    assert [chat_schema.choices_of(request) for request in read] == [1, 1]


def test_parsed_arguments_equal_their_text() -> None:
    """Some clients parse a call's arguments and send them back as an object."""
    spelled = [
        request_body.decode(
            json.dumps(
                {
                    "model": "policy",
                    "messages": [
                        {
                            "role": "assistant",
                            "tool_calls": [{"function": {"name": "look", "arguments": arguments}}],
                        }
                    ],
                }
            ).encode(),
            chat_schema.ChatCompletionRequest,
        )
        for arguments in ('{"at":"shelf"}', {"at": "shelf"})
    ]
    (one,), (other,) = (chat_schema.messages_of(request) for request in spelled)
    assert one.key == other.key


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"functions": [{"name": "look"}]}, "functions are not supported"),
        ({"modalities": ["text", "audio"]}, "modalities has 'audio'"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"messages": [{"role": "assistant", "function_call": {"name": "look"}}]}, "tool_calls"),
    ],
)
def test_unsupported_answer_forms_are_refused(asked: dict[str, Any], says: str) -> None:
    """A program that depends on the form gets an error, not an answer that it cannot parse."""
    body = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]} | asked
    request = request_body.decode(json.dumps(body).encode(), chat_schema.ChatCompletionRequest)
    with pytest.raises(InvalidArgument, match=says):
        chat_schema.choices_of(request)
        list(chat_schema.messages_of(request))
