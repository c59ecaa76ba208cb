"""Namespaces and custom tools: functions in the prompt, themselves in answers and histories."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from prometheus_client import REGISTRY
from pydantic import TypeAdapter

from forge.core.conversation.messages import Message, ToolCall, same
from forge.core.errors import InvalidArgument
from forge.core.formats import CallDelta
from services.gateway.http.openai.responses.events import Events
from services.gateway.http.openai.responses.history import messages_of
from services.gateway.http.openai.responses.items import Head, output_of
from services.gateway.http.openai.responses.tools import (
    TOOLS_OMITTED,
    count_omitted,
    responses_tools,
    tool_set,
)

LARK = {"type": "grammar", "syntax": "lark", "definition": 'start: "go " /.+/'}
GIVEN: list[dict[str, Any]] = [
    {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": False},
    {
        "type": "namespace",
        "name": "mcp__notes",
        "description": "Notes of the team.",
        "tools": [
            {"type": "function", "name": "add", "description": "Adds one.", "parameters": {}},
            {"type": "custom", "name": "run", "description": "Runs a text."},
        ],
    },
    {"type": "custom", "name": "patch", "description": "Patches files.", "format": LARK},
]
TOOLS = tool_set(GIVEN, omit_web_search=False)
HEAD = Head(
    key="a" * 32,
    created_at=1.5,
    model="m",
    instructions=None,
    tools=responses_tools(TOOLS.tools, TOOLS.names),
    names=TOOLS.names,
    echoed={},
)
official: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
CALLS = [
    ToolCall(name="look", arguments="{}", call_id="c1"),
    ToolCall(name="mcp__notes__add", arguments='{"a": 1}', call_id="c2"),
    ToolCall(name="mcp__notes__run", arguments='{"input": "x\\n\\"y"}', call_id="c3"),
    ToolCall(name="patch", arguments='{"input": "go on"}', call_id="c4"),
]


def test_tools_of_responses_are_functions_in_the_prompt() -> None:
    """A namespace is a part of the names, a custom tool has one text, a grammar is strict."""
    functions = [tool["function"] for tool in TOOLS.tools]
    assert [function["name"] for function in functions] == [call.name for call in CALLS]
    assert functions[1]["description"] == "Notes of the team.\n\nAdds one."
    assert functions[2]["parameters"]["properties"] == {"input": {"type": "string"}}
    assert "strict" not in functions[2]
    patch = functions[3]
    assert patch["parameters"]["properties"]["input"]["pattern"] == "^(?:go (?:.+))$"
    assert patch["strict"] is True


def test_answers_have_the_agents_own_tools() -> None:
    """Items have namespace, name and text; the SDK's types take the response with its tools."""
    answer = Message(role="assistant", tool_calls=tuple(CALLS))
    output = output_of(HEAD, answer, "completed")
    shown = [(item["type"], item["name"], item.get("namespace")) for item in output]
    assert shown == [
        ("function_call", "look", None),
        ("function_call", "add", "mcp__notes"),
        ("custom_tool_call", "run", "mcp__notes"),
        ("custom_tool_call", "patch", None),
    ]
    assert [item["input"] for item in output[2:]] == ['x\n"y', "go on"]
    response = Response.model_validate(HEAD.response("completed", output))
    assert [tool.type for tool in response.tools] == ["function", "namespace", "custom"]


def test_streams_have_the_events_of_custom_tools() -> None:
    """Each event is one that OpenAI's own types take; the items equal those of a whole answer."""
    events = Events(HEAD)
    deltas = [
        CallDelta(name=call.name, arguments=call.arguments, call_id=call.call_id) for call in CALLS
    ]
    seen = [*events.start(), *events.add_deltas(deltas), *events.finish("completed", {}, {})]
    for event in seen[:-1]:
        assert official.validate_python(event).type == event["type"]
    assert [event["delta"] for event in seen if event["type"].endswith("input.delta")] == [
        'x\n"y',
        "go on",
    ]
    answer = Message(role="assistant", tool_calls=tuple(CALLS))
    assert seen[-1]["response"]["output"] == output_of(HEAD, answer, "completed")


texts = st.text(max_size=8) | st.sampled_from(['{"input": "a"}', "{}", "[", '{"input": 1}'])


@given(st.lists(st.tuples(st.sampled_from(CALLS), texts, st.booleans()), min_size=1, max_size=4))
def test_returned_answer_equals_the_recorded_one(sampled: list[tuple[ToolCall, str, bool]]) -> None:
    """For any arguments of the model, also for a custom tool without its text."""
    calls = [
        ToolCall(
            name=call.name,
            arguments=text if raw else json.dumps({"input": text}),
            call_id=call.call_id,
        )
        for call, text, raw in sampled
    ]
    answer = Message(role="assistant", tool_calls=tuple(calls))
    (returned,) = messages_of(output_of(HEAD, answer, "completed"))
    assert same(answer, returned)


def test_results_of_custom_tools_are_tool_messages() -> None:
    """With a text, or with parts."""
    outputs: list[dict[str, Any]] = [
        {"type": "custom_tool_call_output", "call_id": "c3", "output": "done"},
        {
            "type": "custom_tool_call_output",
            "call_id": "c4",
            "output": [{"type": "input_text", "text": "ok"}],
        },
    ]
    assert messages_of(outputs) == [
        Message(role="tool", content="done", tool_call_id="c3"),
        Message(role="tool", content="ok", tool_call_id="c4"),
    ]


def test_web_search_is_left_out_if_allowed_and_named() -> None:
    """In a header and a metric, once for each request; elsewhere it is refused."""
    given = [GIVEN[0], {"type": "web_search"}, {"type": "web_search_preview"}]
    tools = tool_set(given, omit_web_search=True)
    assert len(tools.tools) == 1
    name, labels = "forge_gateway_omitted_tools_total", {"type": "web_search"}
    before = REGISTRY.get_sample_value(name, labels) or 0.0
    assert count_omitted(tools.omitted) == {TOOLS_OMITTED: "web_search"}
    assert (REGISTRY.get_sample_value(name, labels) or 0.0) - before == 1
    assert count_omitted(()) == {}
    with pytest.raises(InvalidArgument, match=r"tools\[1\].*'web_search'"):
        tool_set(given, omit_web_search=False)


@pytest.mark.parametrize(
    ("tool", "says"),
    [
        ({"type": "function"}, r"tools\[0\] must be a function with a name"),
        ({"type": "custom"}, r"tools\[0\] must be a custom with a name"),
        ({"type": "file_search"}, r"tools\[0\].*'file_search'"),
        ({"type": "namespace", "name": "a"}, "a namespace with a name and tools"),
        ({"type": "namespace", "name": "a", "tools": [7]}, r"tools\[0\]\.tools\[0\]"),
        (
            {"type": "namespace", "name": "a", "tools": [{"type": "mcp"}]},
            r"tools\[0\]\.tools\[0\].*'mcp'",
        ),
        ({"type": "custom", "name": "a", "format": {"type": "xml"}}, r"tools\[0\]\.format"),
        (
            {"type": "custom", "name": "a", "format": {"type": "grammar", "syntax": "lark"}},
            "a syntax and a definition",
        ),
        (
            {
                "type": "custom",
                "name": "a",
                "format": {"type": "grammar", "syntax": "lark", "definition": "start: start"},
            },
            r"tools\[0\]\.format\.definition cannot be enforced",
        ),
    ],
)
def test_unsupported_tools_are_refused_with_their_place(tool: dict[str, Any], says: str) -> None:
    """A tool without an executor, and a grammar that cannot be enforced."""
    with pytest.raises(InvalidArgument, match=says):
        tool_set([tool], omit_web_search=True)


def test_two_tools_with_one_name_in_the_prompt_are_refused() -> None:
    """An answer could not say which is called."""
    twin = {"type": "function", "name": "mcp__notes__add"}
    for twins in ([GIVEN[1], twin], [twin, GIVEN[1]]):
        with pytest.raises(InvalidArgument, match="'mcp__notes__add' names two tools"):
            tool_set(twins, omit_web_search=False)
