"""Streamed responses: OpenAI's events, in OpenAI's order, and the items that come of them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from forge.core.conversation.messages import Message, ToolCall
from forge.core.formats import CallDelta, Delta, ReasoningDelta, TextDelta, collect
from services.gateway.http.errors import Failure
from services.gateway.http.openai.responses.events import Event, Events
from services.gateway.http.openai.responses.history import messages_of
from services.gateway.http.openai.responses.items import Head, output_of, response_key, usage

KEY = "a" * 32
HEAD = Head(
    key=KEY,
    created_at=1.5,
    model="m",
    instructions="Be brief.",
    tools=[{"type": "function", "name": "look", "parameters": {}, "strict": None}],
    echoed={"temperature": 0.5, "metadata": {"a": "b"}},
)
SPENT = usage(prompt_tokens=5, cached_tokens=2, sampled_tokens=7, reasoning_tokens=3)
LOOK = CallDelta(name="look", arguments='{"at":"a"}', call_id="call_1")

official: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def run(deltas: list[Delta], status: str = "completed") -> list[Event]:
    events = Events(HEAD)
    details = {"incomplete_details": {"reason": "max_output_tokens"}}
    end = events.finish(status, SPENT, details if status == "incomplete" else {})
    return [*events.start(), *events.add_deltas(deltas), *end]


def check(events: list[Event]) -> None:
    """Each event is one that OpenAI's own types take, and none has a number twice."""
    for number, event in enumerate(events):
        assert official.validate_python(event).type == event["type"]
        assert event["sequence_number"] == number


def names(events: list[Event]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


def test_complete_answer_has_every_event_in_order() -> None:
    """Reasoning, text and a call: each is announced, filled and closed before the next."""
    deltas: list[Delta] = [
        ReasoningDelta(text="h"),
        ReasoningDelta(text="m"),
        TextDelta(text="I look."),
        LOOK,
    ]
    events = run(deltas)
    check(events)
    opened, closed = ["output_item.added"], ["output_item.done"]
    part_added, part_done = ["content_part.added"], ["content_part.done"]
    assert names(events) == [
        *("created", "in_progress"),
        *opened,
        *part_added,
        *("reasoning_text.delta", "reasoning_text.delta", "reasoning_text.done"),
        *part_done,
        *closed,
        *opened,
        *part_added,
        *("output_text.delta", "output_text.done"),
        *part_done,
        *closed,
        *opened,
        *("function_call_arguments.delta", "function_call_arguments.done"),
        *closed,
        "completed",
    ]
    response = Response.model_validate(events[-1]["response"])
    assert [item.id for item in response.output] == [f"rs_{KEY}_0", f"msg_{KEY}_1", f"fc_{KEY}_2"]
    assert (response.id, response.status, response.output_text) == (
        f"resp_{KEY}",
        "completed",
        "I look.",
    )
    assert response.usage is not None
    assert response.usage.output_tokens_details.reasoning_tokens == 3
    assert (response.temperature, response.metadata) == (0.5, {"a": "b"})


def test_truncated_answer_is_incomplete() -> None:
    """The last event and the truncated item say so, with the reason."""
    events = run([TextDelta(text="I lo")], status="incomplete")
    check(events)
    assert names(events)[-1] == "incomplete"
    response = events[-1]["response"]
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["status"] for item in response["output"]] == ["incomplete"]


def test_empty_answer_has_an_empty_message() -> None:
    """Agents look for a message."""
    for deltas in ([], [ReasoningDelta(text="hm")]):
        events = run(list(deltas))
        check(events)
        assert events[-1]["response"]["output"][-1]["content"][0]["text"] == ""


def test_failure_in_mid_stream_ends_the_stream_with_its_reason() -> None:
    """Open items are closed, and the last event has the error."""
    events = Events(HEAD)
    seen = [*events.start(), *events.add_deltas([TextDelta(text="I lo")])]
    seen += events.fail("server_error", "the router is gone")
    check(seen)
    response = Response.model_validate(seen[-1]["response"])
    assert (response.status, seen[-1]["type"]) == ("failed", "response.failed")
    assert response.error is not None
    assert response.error.message == "the router is gone"


@pytest.mark.parametrize("begun", [False, True])
def test_failure_has_one_end_over_a_socket(begun: bool) -> None:
    """A client that takes `error` for the end would take `response.failed` for the next one."""
    events = Events(HEAD, one_end=True)
    seen = list(events.start()) if begun else []
    failure = Failure(status=400, message="gone", code="server_error")
    seen += events.fail("server_error", "gone") if begun else events.refuse(failure)
    check(seen)
    assert names(seen) == ["created", "in_progress", "failed"]


def test_logprobs_come_with_the_last_event() -> None:
    """The tokens of a text are known for certain only at the end."""
    events = Events(HEAD)
    logprobs = [{"token": "A", "logprob": -0.5, "bytes": [65], "top_logprobs": []}]
    seen = [*events.start(), *events.add_deltas([TextDelta(text="A")])]
    seen += events.finish("completed", SPENT, {}, logprobs)
    check(seen)
    assert seen[-1]["response"]["output"][0]["content"][0]["logprobs"] == logprobs


texts = st.text("ab c", min_size=1, max_size=4)
deltas_of_an_answer = st.tuples(
    st.lists(st.builds(ReasoningDelta, text=texts), max_size=3),
    st.lists(
        st.builds(TextDelta, text=texts)
        | st.builds(CallDelta, name=st.just("look"), arguments=st.just("{}"), call_id=texts),
        max_size=5,
    ),
).map(lambda both: [*both[0], *both[1]])


@given(deltas_of_an_answer, st.booleans())
def test_echoed_items_match_the_sampled_message(deltas: list[Delta], ids: bool) -> None:
    """With ids or without."""
    said = collect(deltas, "")
    calls = tuple(
        ToolCall(name=call.name, arguments=call.arguments, call_id=call.call_id)
        for call in said.calls
    )
    sampled = Message(
        role="assistant", content=said.content, reasoning=said.reasoning, tool_calls=calls
    )
    events = run(deltas)
    check(events)
    for output in (events[-1]["response"]["output"], output_of(HEAD, sampled, "completed")):
        echoed = [
            {key: value for key, value in item.items() if ids or key != "id"} for item in output
        ]
        assert messages_of(echoed) == [sampled]


@pytest.mark.parametrize("given_id", ["", "resp_", "resp_1", f"msg_{KEY}", f"resp_{KEY}x", KEY])
def test_invalid_response_id_has_no_key(given_id: str) -> None:
    """Only ids of a gateway can name a response."""
    assert response_key(given_id) == ""
    assert response_key(HEAD.response_id) == KEY
