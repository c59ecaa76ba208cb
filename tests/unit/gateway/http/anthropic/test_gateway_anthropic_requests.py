"""Anthropic requests: every request is accepted or refused, without another error."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forge.core.conversation.messages import Message, ToolCall
from forge.core.conversation.request_prefix import History
from forge.core.errors import ForgeError, InvalidArgument
from forge.core.formats import get_format
from forge.v1 import common_pb2
from services.gateway.conversation.conversation import Conversation
from services.gateway.http.anthropic import schema
from services.gateway.http.anthropic.history import messages_of
from services.gateway.http.anthropic.schema import Shown
from services.gateway.http.request_fields.request_body import decode
from tests.support.gateway.chat_templates import make_model

MODEL = make_model("chatml")
LOOK = {"name": "look", "description": "Look.", "input_schema": {"type": "object"}}
USER = {"role": "user", "content": "hi"}

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=6,
)


def asked(**fields: Any) -> schema.MessagesRequest:
    body = {"model": "policy", "max_tokens": 10, "messages": [USER]} | fields
    return decode(json.dumps(body).encode(), schema.MessagesRequest)


def read(*messages: Any, **fields: Any) -> list[Message]:
    return list(messages_of(asked(messages=list(messages), **fields)))


def said(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def heard(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value, "cache_control": {"type": "ephemeral"}}


def result(content: Any = None, **fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "a", "content": content} | fields


def use(**fields: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": "a", "name": "look", "input": {"at": 1}} | fields


def test_system_text_is_the_first_message() -> None:
    """A string, or joined blocks; without text there is no message."""
    system = Message(role="system", content="Be brief. Be kind.")
    one = Message(role="user", content="hi")
    assert read(USER, system="Be brief. Be kind.") == [system, one]
    assert read(USER, system=[text("Be brief. "), text("Be kind.")]) == [system, one]
    assert read(USER, system="") == read(USER, system=[]) == read(USER, system=None) == [one]


def test_accounting_line_of_claude_code_is_dropped() -> None:
    """It differs with every call and would make each turn a branch."""
    line = "x-anthropic-billing-header: cc_version=2; cch=1f;"
    blocks = read(USER, system=[text(line), text("Be brief.")])
    assert blocks == read(USER, system=f"{line}\nBe brief.") == read(USER, system="Be brief.")


def test_accounting_line_does_not_hide_a_recognized_prefix() -> None:
    """With another such line before it, a request is recognized, and decoded behind its mark."""

    def request(number: int, *messages: Any) -> History:
        system = [text(f"x-anthropic-billing-header: cch={number};"), text("Be brief.")]
        return messages_of(asked(messages=[*messages], system=system))

    known = request(1, USER).mark()
    later = request(22, USER, said(text("ok")), USER)
    assert later.known([known]) == known
    assert later.behind(known) == read(USER, said(text("ok")), USER)[1:]


def test_user_message_is_split_at_tool_results() -> None:
    """Each result is a message; text keeps its place before, between and after."""
    blocks = (text("so"), text(": "), result("1"), result([text("2"), text("3")]), text("and?"))
    assert read(heard(*blocks)) == [
        Message(role="user", content="so: "),
        Message(role="tool", content="1", tool_call_id="a"),
        Message(role="tool", content="23", tool_call_id="a"),
        Message(role="user", content="and?"),
    ]
    assert read(heard()) == [Message(role="user")]


@pytest.mark.parametrize(
    ("content", "becomes"),
    [
        ("no such file", "Error: no such file"),
        ([text("no such file")], "Error: no such file"),
        ("ERROR 7", "ERROR 7"),
        (None, "Error"),
        ([], "Error"),
    ],
)
def test_failed_tool_result_begins_with_error(content: Any, becomes: str) -> None:
    """Templates have no place for `is_error`, so the text has it, once."""
    (message,) = read(heard(result(content, is_error=True)))
    assert message.content == becomes


def test_assistant_blocks_are_one_message() -> None:
    """Text, reasoning and calls are separated at any position."""
    thinking = {"type": "thinking", "thinking": "hm", "signature": "whatever"}
    redacted = {"type": "redacted_thinking", "data": "x"}
    message = read(said(thinking, text("I "), use(), text("look"), redacted), USER)[0]
    assert message == Message(
        role="assistant",
        content="I look",
        reasoning="hm",
        tool_calls=(ToolCall(name="look", arguments='{"at": 1}', call_id="a"),),
    )


def test_numbers_in_arguments_are_not_rounded() -> None:
    """Arguments keep their spelling, with any numbers."""
    body = (
        b'{"model":"m","max_tokens":1,"messages":[{"role":"assistant","content":[{"type":'
        b'"tool_use","id":"a","name":"f","input":{"n": 123456789012345678901234567890, "x": 1e0}}'
        b']},{"role":"user","content":"go on"}]}'
    )
    call = messages_of(decode(body, schema.MessagesRequest))[0].tool_calls[0]
    assert call.arguments == '{"n": 123456789012345678901234567890, "x": 1e0}'


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([heard({"type": "image", "source": {}})], r"messages\[0\].content\[0\].*'image'"),
        ([heard(text("a"), {"type": "document"})], r"messages\[0\].content\[1\].*'document'"),
        ([heard(result([{"type": "image"}]))], r"content\[0\].content\[0\].*'image'"),
        ([heard({"type": "web_search_tool_result", "content": {}})], "web_search_tool_result"),
        ([heard(use())], r"messages\[0\].content\[0\].*'tool_use'"),
        ([USER, said(result("x")), USER], r"messages\[1\].content\[0\].*'tool_result'"),
        ([said(use(input="x")), USER], "object as its input"),
        ([said(use(name="")), USER], "must have a name"),
        ([heard(result("x", tool_use_id=""))], "tool_use_id"),
        ([heard(result({}))], "text or blocks of text"),
        ([heard({"type": "text"})], "needs its text"),
        ([{"role": "king", "content": "x"}], r"messages\[0\]: role 'king'"),
        ([{"role": "tool", "content": "x"}], "tool_result blocks"),
        ([USER, {"role": "user", "content": 7}], r"`messages\[1\].content`"),
        ([], "must not be empty"),
    ],
)
@pytest.mark.parametrize("system", [None, "Be brief."])
def test_invalid_blocks_are_refused_by_name(messages: Any, says: str, system: str | None) -> None:
    """The error names the block, by the agent's numbering, and the problem."""
    with pytest.raises(InvalidArgument, match=says):
        read(*messages, system=system)


def test_errors_behind_a_recognized_prefix_have_the_same_names() -> None:
    """Messages are counted from the start of the request."""
    before = [heard(result("1"), result("2")), said(text("ok"))]
    known = messages_of(asked(messages=[*before, USER], system="Be brief.")).mark()
    later = messages_of(
        asked(
            messages=[*before, USER, said(text("yes")), heard({"type": "image"})],
            system="Be brief.",
        )
    )
    mark = later.known([known])
    assert mark == known
    with pytest.raises(InvalidArgument, match=r"messages\[4\].content\[0\]: .*'image'"):
        later.behind(mark)


def test_recognized_prefix_gives_the_same_messages() -> None:
    """Decoding behind a mark equals decoding the whole, and another system prompt is another
    prefix."""
    before = [heard(result("1"), result("2")), said(text("ok")), USER]
    after = [said(use()), heard(result("3"), text("and?"))]
    known = messages_of(asked(messages=before, system="Be brief.")).mark()
    later = messages_of(asked(messages=[*before, *after], system="Be brief."))
    assert later.behind(later.known([known])) == list(later)[known.messages :]
    assert messages_of(asked(messages=before, system="Be long.")).known([known]) is None


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        (
            {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
            r"tools\[0\].*'web_search_20250305'",
        ),
        (
            {"tools": [{"type": "bash_20250124", "name": "sh"}]},
            r"tools\[0\].*must be named 'bash', not 'sh'",
        ),
        (
            {"tools": [{"type": "computer_20250124", "name": "computer"}]},
            r"tools\[0\]: .*display_width_px",
        ),
        ({"tools": [{"name": "look"}]}, r"tools\[0\] must have a name and an input_schema"),
        ({"tool_choice": {"type": "any"}}, "no tools"),
        ({"tools": [LOOK], "tool_choice": {"type": "tool"}}, "needs a name"),
        ({"tools": [LOOK], "tool_choice": {"type": "tool", "name": "hit"}}, "names 'hit'"),
        ({"max_tokens": 0}, "max_tokens = 0"),
        ({"top_p": 7}, "top_p = 7"),
        ({"top_k": -7}, "top_k = -7"),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences has 17"),
        ({"context_management": {"edits": [{"type": "compact_20260112"}]}}, "'compact_20260112'"),
        ({"container": "c"}, "container"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"messages": 7}, "messages must be an array"),
    ],
)
def test_unsupported_fields_are_refused(fields: dict[str, Any], says: str) -> None:
    """Also values out of range; the error names the field."""
    with pytest.raises(InvalidArgument, match=says):
        everything(asked(**fields))


def test_fields_that_change_nothing_are_accepted() -> None:
    """Hints to Anthropic's own service."""
    request = asked(
        metadata={"user_id": "me"},
        service_tier="auto",
        speed="fast",
        inference_geo="eu",
        diagnostics={"previous_message_id": None},
        output_config={"effort": "max"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        thinking={"type": "enabled", "budget_tokens": 1024},
        cache_control={"type": "ephemeral"},
        temperature=0.5,
        top_k=40,
    )
    everything(request)
    assert schema.sampling_of(request) == common_pb2.SamplingParams(
        max_tokens=10, temperature=0.5, top_k=40
    )


@pytest.mark.parametrize(
    ("choice", "required", "calls", "parallel"),
    [
        (None, None, True, True),
        ({"type": "auto"}, None, True, True),
        ({"type": "auto", "disable_parallel_tool_use": True}, None, True, False),
        ({"type": "any"}, "look", True, True),
        ({"type": "tool", "name": "look"}, "look", True, True),
        ({"type": "none"}, None, False, True),
    ],
)
def test_tool_choice_is_mapped(
    choice: Any, required: str | None, calls: bool, parallel: bool
) -> None:
    """Each choice asks the turn for what it says."""
    request = asked(tools=[LOOK], tool_choice=choice)
    tools = schema.tools_of(request)
    function = {"name": "look", "description": "Look.", "parameters": {"type": "object"}}
    assert tools == [{"type": "function", "function": function}]
    assert schema.required_tool(request, tools, get_format("hermes")) == required
    assert schema.calls_tools(request) is calls
    assert schema.parallel_calls(request) is parallel


async def test_answer_schema_and_strict_tools_become_grammars() -> None:
    """A schema becomes the grammar of the answer; a strict tool is marked."""
    form = {"type": "json_schema", "schema": {"type": "object", "properties": {}}}
    grammar = common_pb2.Grammar(json_schema=json.dumps(form["schema"]))
    assert await schema.grammar_of(asked(output_config={"format": form})) == grammar
    assert await schema.grammar_of(asked(output_format=form)) == grammar
    assert await schema.grammar_of(asked(output_config={"effort": "low"})) is None
    wrong = {"format": form | {"schema": {"type": "king"}}}
    with pytest.raises(InvalidArgument, match=r"output_config.format.schema"):
        await schema.grammar_of(asked(output_config=wrong))
    (tool,) = schema.tools_of(asked(tools=[LOOK | {"strict": True}]))
    assert tool["function"]["strict"] is True


@pytest.mark.parametrize(
    ("thinking", "shown"),
    [
        (None, Shown.NOTHING),
        ({"type": "disabled"}, Shown.NOTHING),
        ({"type": "enabled", "budget_tokens": 2048}, Shown.TEXT),
        ({"type": "adaptive"}, Shown.TEXT),
        ({"type": "adaptive", "display": "omitted"}, Shown.BLOCKS),
    ],
)
def test_thinking_is_returned_on_request(thinking: Any, shown: Shown) -> None:
    """Other agents would take the first block for the text."""
    assert schema.shown_of(asked(thinking=thinking)) is shown


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_any_body_is_understood_or_refused(data: st.DataObject) -> None:
    """Every body gives a prompt or a `ForgeError`."""

    def loosely(*likely: Any) -> Any:
        return data.draw(st.sampled_from(likely) | json_values)

    kinds = ("text", "tool_use", "tool_result", "thinking", "image")
    blocks = [
        {"type": loosely(*kinds), "text": loosely("x"), "thinking": loosely("hm")}
        | {"input": loosely({}), "name": loosely("look"), "tool_use_id": loosely("a")}
        | {"content": loosely("x", [text("x")]), "is_error": loosely(True, None)}
        for _ in range(data.draw(st.integers(0, 2)))
    ]
    message = {"role": loosely("user", "assistant", "system"), "content": loosely("x", blocks)}
    body = {
        "model": loosely("policy"),
        "max_tokens": loosely(10),
        "messages": loosely([message, USER]),
        "system": loosely("x", [text("x")]),
        "tools": loosely([LOOK], [{"name": "x", "input_schema": loosely({})}]),
        "tool_choice": loosely({"type": "auto"}, {"type": "any"}),
        "thinking": loosely({"type": "adaptive"}, None),
    }
    try:
        everything(decode(json.dumps(body).encode(), schema.MessagesRequest))
    except ForgeError as error:
        assert str(error)


def everything(request: schema.MessagesRequest) -> None:
    """All that is read of a request on its way to a prompt."""
    schema.check(request)
    tools = schema.tools_of(request)
    schema.required_tool(request, tools, MODEL.format)
    schema.sampling_of(request)
    schema.stops_of(request)
    schema.shown_of(request)
    Conversation(model=MODEL).draft(messages_of(request), tools)
