"""Responses requests from the wire: items become the messages they came from, the rest is refused
in words."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forge.core.conversation.messages import Message, ToolCall
from forge.core.errors import ForgeError, InvalidArgument
from services.gateway.conversation.conversation import Conversation
from services.gateway.http.openai.responses import schema as responses_schema
from services.gateway.http.openai.responses.history import history_of, messages_of
from services.gateway.http.openai.responses.schema import ResponsesRequest
from services.gateway.http.openai.responses.tools import responses_tools, tool_set
from services.gateway.http.request_fields import request_body
from tests.support.gateway.chat_templates import make_model

MODEL = make_model("chatml")
ONE, TWO = "1" * 32, "2" * 32


def text(role: str, said: str, item_id: str | None = None) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    item = {"type": "message", "role": role, "content": [{"type": kind, "text": said}]}
    return item | ({"id": item_id} if item_id else {})


def thought(said: str, item_id: str | None = None) -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": said}]
    return {"type": "reasoning", "summary": [], "content": content, "id": item_id}


def called(call_id: str, item_id: str | None = None) -> dict[str, Any]:
    item = {"type": "function_call", "call_id": call_id, "name": "look", "arguments": "{}"}
    return item | ({"id": item_id} if item_id else {})


def result(call_id: str) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": "seen"}


def answer(content: str = "", reasoning: str = "", calls: tuple[str, ...] = ()) -> Message:
    tool_calls = tuple(ToolCall(name="look", arguments="{}", call_id=call) for call in calls)
    return Message(role="assistant", content=content, reasoning=reasoning, tool_calls=tool_calls)


def tool(call_id: str) -> Message:
    return Message(role="tool", content="seen", tool_call_id=call_id)


USER = Message(role="user", content="hi")

HISTORIES: dict[str, tuple[Any, list[Message]]] = {
    "text": ("hi", [USER]),
    "empty text": ("", [Message(role="user")]),
    "easy messages": (
        [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "hi"}],
        [Message(role="system", content="Be brief."), USER],
    ),
    "one turn": (
        [thought("hm"), text("assistant", "I look."), called("a"), called("b"), result("a")],
        [answer("I look.", "hm", ("a", "b")), tool("a")],
    ),
    "text behind a call": (
        [text("assistant", "I look."), called("a"), text("assistant", "So."), result("a")],
        [answer("I look.So.", calls=("a",)), tool("a")],
    ),
    "two answers in a row": (
        [text("assistant", "A"), text("assistant", "B")],
        [answer("A"), answer("B")],
    ),
    "reasoning begins an answer": (
        [text("assistant", "A"), thought("hm"), text("assistant", "B")],
        [answer("A"), answer("B", "hm")],
    ),
    "ids tell two turns apart": (
        [text("assistant", "A", f"msg_{ONE}_0"), called("b", f"fc_{TWO}_0")],
        [answer("A"), answer(calls=("b",))],
    ),
    "ids join what looks like two turns": (
        [text("assistant", "A", f"msg_{ONE}_0"), text("assistant", "B", f"msg_{ONE}_1")],
        [answer("AB")],
    ),
    "results directly behind their calls": (
        [called("a", f"fc_{ONE}_0"), result("a"), called("b", f"fc_{ONE}_1"), result("b")],
        [answer(calls=("a", "b")), tool("a"), tool("b")],
    ),
    "turns of one call each": (
        [called("a", f"fc_{ONE}_0"), result("a"), called("b", f"fc_{TWO}_0"), result("b")],
        [answer(calls=("a",)), tool("a"), answer(calls=("b",)), tool("b")],
    ),
    "the same without ids": (
        [called("a"), result("a"), called("b"), result("b")],
        [answer(calls=("a",)), tool("a"), answer(calls=("b",)), tool("b")],
    ),
    "foreign ids say nothing": (
        [text("assistant", "A", "msg_abc"), called("a", "fc_xyz")],
        [answer("A", calls=("a",))],
    ),
    "a summary stands for its reasoning": (
        [
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
            text("assistant", "A"),
        ],
        [answer("A", "hm")],
    ),
    "a result in parts": (
        [
            {
                "type": "function_call_output",
                "call_id": "a",
                "output": [{"type": "input_text", "text": "se"}, {"type": "text", "text": "en"}],
            }
        ],
        [tool("a")],
    ),
}


@pytest.mark.parametrize("name", HISTORIES)
def test_items_become_their_original_messages(name: str) -> None:
    """An answer split into any items, with any ids, is one message."""
    items, messages = HISTORIES[name]
    assert messages_of(items) == messages


@pytest.mark.parametrize(
    ("item", "says"),
    [
        ({"type": "local_shell_call", "id": "msg_1"}, "'local_shell_call'"),
        ({"type": "computer_call_output", "output": {}}, "'computer_call_output'"),
        ({"type": 7}, "'7'"),
        ({"role": "king", "content": "hi"}, "king"),
        ({"role": "tool", "content": "hi"}, "function_call_output"),
        ({"role": "user", "content": [{"type": "input_image"}]}, "text only"),
        ({"role": "user", "content": 7}, r"\$\.content"),
        ({"type": "function_call", "name": "look"}, "call_id"),
    ],
)
def test_unsupported_items_are_named(item: dict[str, Any], says: str) -> None:
    """The error gives the item and the unknown part."""
    with pytest.raises(InvalidArgument, match=says) as caught:
        messages_of([{"role": "user", "content": "hi"}, item])
    assert str(caught.value).startswith("input[1]: ")


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("background", True, "background"),
        ("conversation", "conv_1", "previous_response_id"),
        ("conversation", {"id": "conv_1"}, "conversation"),
        ("prompt", {"id": "p"}, "prompt"),
        ("context_management", [{"type": "compaction"}], "context_management"),
        ("moderation", {"model": "m"}, "moderation"),
        ("truncation", "auto", "'auto'"),
        ("metadata", {str(n): "" for n in range(17)}, "17 pairs"),
        ("metadata", {"k": "v" * 513}, "'k'"),
    ],
)
def test_unsupported_fields_of_responses_are_refused(field: str, value: Any, says: str) -> None:
    """A field without effect would mislead an agent."""
    body = {"model": "policy", "input": "hi", field: value}
    asked = request_body.decode(json.dumps(body).encode(), ResponsesRequest)
    with pytest.raises(InvalidArgument, match=says):
        responses_schema.check(asked)


@pytest.mark.parametrize(
    "body",
    [
        {"include": ["reasoning.encrypted_content", "message.output_text.logprobs"]},
        {"user": "me", "safety_identifier": "me", "service_tier": "auto", "unheard_of": 1},
        {"text": {"format": {"type": "text"}, "verbosity": "low"}},
        {"reasoning": {"effort": "high", "summary": "auto"}, "truncation": "disabled"},
        {"background": False, "store": False, "top_logprobs": 0, "metadata": {"a": "b"}},
    ],
)
def test_fields_without_effect_are_accepted(body: dict[str, Any]) -> None:
    """Fields that clients send by default."""
    body = {"model": "policy", "input": "hi", **body}
    responses_schema.check(request_body.decode(json.dumps(body).encode(), ResponsesRequest))


async def test_answer_format_becomes_a_grammar() -> None:
    """A schema binds the answer; text needs no grammar; an unknown format is refused."""
    schema_given = {"type": "object", "properties": {"at": {"type": "string"}}}
    form = {"type": "json_schema", "name": "place", "schema": schema_given, "strict": True}
    asked = ResponsesRequest(model="policy", text={"format": form, "verbosity": "low"})
    grammar = await responses_schema.answer_grammar_of(asked)
    assert grammar is not None
    assert json.loads(grammar.json_schema) == schema_given
    for plain in (None, {}, {"format": {"type": "text"}}):
        asked = ResponsesRequest(model="policy", text=plain)
        assert await responses_schema.answer_grammar_of(asked) is None
    for wrong in ("json", {"type": "yaml"}, {"type": "json_schema", "name": "place"}):
        asked = ResponsesRequest(model="policy", text={"format": wrong})
        with pytest.raises(InvalidArgument, match=r"text\.format"):
            await responses_schema.answer_grammar_of(asked)


def test_large_request_fields_are_echoed_but_not_stored() -> None:
    """They come again with each request."""
    form = {"type": "json_schema", "name": "place", "schema": {"type": "object"}}
    echoed: dict[str, Any] = {"text": {"format": form}, "metadata": {"a": "b"}}
    kept = responses_schema.remembered(echoed)
    assert kept == {"text": {"format": form | {"schema": {}}}, "metadata": {"a": "b"}}
    assert echoed["text"]["format"] == form


def test_tools_are_translated_to_chat_completions_and_back() -> None:
    """Both protocols give the model the same prompt; the response repeats the sent tools."""
    sent = {
        "type": "function",
        "name": "look",
        "description": "Look.",
        "parameters": {"type": "object"},
        "strict": True,
    }
    (tool_given,) = tool_set([sent], omit_web_search=False).tools
    assert tool_given == {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Look.",
            "parameters": {"type": "object"},
            "strict": True,
        },
    }
    assert responses_tools([tool_given], {}) == [sent]


@pytest.mark.parametrize(
    ("choice", "wanted"),
    [
        (None, None),
        ("auto", None),
        ("none", None),
        ("required", ""),
        ({"type": "function", "name": "look"}, "look"),
        ({"type": "function", "name": "look", "namespace": "room"}, "room__look"),
        ({"type": "custom", "name": "patch"}, "patch"),
    ],
)
def test_tool_choice_is_mapped(choice: Any, wanted: str | None) -> None:
    """All that a client may choose, in our words."""
    asked = ResponsesRequest(model="policy", tool_choice=choice)
    assert responses_schema.wanted_tool(asked) == wanted


@pytest.mark.parametrize(
    ("choice", "says"),
    [
        ("sometimes", "'sometimes'"),
        ({"type": "web_search"}, "'web_search'"),
        ({"type": "allowed_tools", "mode": "auto", "tools": []}, "'allowed_tools'"),
        ({"type": "function"}, "a function or a custom tool with a name"),
    ],
)
def test_unsupported_tool_choices_are_named(choice: Any, says: str) -> None:
    """The error repeats the choice."""
    with pytest.raises(InvalidArgument, match=says):
        responses_schema.wanted_tool(ResponsesRequest(model="policy", tool_choice=choice))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=6,
)


def loosely(*likely: Any) -> st.SearchStrategy[Any]:
    """One of the values a client would send, or anything at all."""
    return st.one_of(st.sampled_from(likely), json_values)


parts = loosely("hi", [{"type": "input_text", "text": "hi"}], [{"type": "output_text"}], [{}], None)
items = st.fixed_dictionaries(
    {},
    optional={
        "type": loosely(
            *("message", "function_call", "function_call_output", "reasoning"),
            *("custom_tool_call", "custom_tool_call_output"),
        ),
        "role": loosely("user", "assistant", "system"),
        "content": parts,
        "summary": parts,
        "output": parts,
        "call_id": loosely("x"),
        "name": loosely("look"),
        "arguments": loosely("{}", "["),
        "input": loosely("a"),
        "namespace": loosely("room"),
        "id": loosely(f"msg_{ONE}_0", f"fc_{ONE}_1"),
    },
)
bodies = st.fixed_dictionaries(
    {"model": loosely("policy"), "input": st.lists(items, max_size=4) | json_values},
    optional={
        "instructions": loosely("Be brief."),
        "tools": loosely(
            [{"type": "function", "name": "look"}],
            [{"type": "mcp"}],
            [{}],
            [{"type": "namespace", "name": "room", "tools": [{"type": "custom", "name": "a"}]}],
            [{"type": "custom", "name": "a", "format": {"type": "grammar", "syntax": "lark"}}],
        ),
        "tool_choice": loosely("auto", "required", {"type": "function", "name": "look"}),
        "max_output_tokens": loosely(0, 5, 2**40),
        "temperature": loosely(0, -1),
        "top_p": loosely(1, 2),
        "text": loosely({"format": {"type": "text"}}, {"format": "schema"}),
        "reasoning": loosely({"effort": "low"}),
        "metadata": loosely({"a": "b"}),
        "include": loosely(["reasoning.encrypted_content"]),
        "truncation": loosely("disabled"),
        "previous_response_id": loosely("resp_1"),
    },
)


@given(bodies)
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_json_is_accepted_or_refused_with_a_forge_error(body: dict[str, Any]) -> None:
    """No body of any shape raises anything but an error of our own."""
    try:
        asked = request_body.decode(json.dumps(body).encode(), ResponsesRequest)
        responses_schema.check(asked)
        tools = tool_set(asked.tools, omit_web_search=False).tools
        wanted = responses_schema.wanted_tool(asked)
        if wanted is not None:
            request_body.tool_to_call(wanted, tools, MODEL.format)
        json.dumps(responses_schema.remembered(responses_schema.echoed(asked)))
        draft = Conversation(model=MODEL).draft(
            history_of(bytes(asked.input), asked.instructions), tools
        )
        MODEL.encode(draft.text)
    except ForgeError as error:
        assert error.http_status == 400
