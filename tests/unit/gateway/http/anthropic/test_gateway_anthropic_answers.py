"""Anthropic answers: blocks, streamed or whole, that come back as the message on record."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge.core.conversation.messages import Message, ToolCall, agree
from forge.core.formats import CallDelta, Delta, ReasoningDelta, TextDelta
from forge.v1 import common_pb2
from services.gateway.conversation.prompt import SampledAnswer
from services.gateway.http.anthropic import schema
from services.gateway.http.anthropic.history import messages_of
from services.gateway.http.anthropic.messages import (
    SIGNATURE,
    Blocks,
    content_of,
    ending,
)
from services.gateway.http.anthropic.schema import Shown
from services.gateway.http.message_parts.arguments import input_json
from services.gateway.http.request_fields.request_body import decode
from services.gateway.turns.types import Turn


def turn_of(message: Message, **changes: Any) -> Turn:
    sampled = SampledAnswer(
        columns=common_pb2.SampledTokens(ids=b"\0\0\0\0", logprobs=b"", weight_versions=b""),
        finish_reason=changes.pop("finish_reason", common_pb2.FINISH_REASON_STOP),
        answer=message,
    )
    fields: dict[str, Any] = {"turn_index": 0, "prompt_tokens": 5, "stop_text": ""} | changes
    fields = {"prefill": "", "prompt_ids": b""} | fields
    columns: dict[str, Any] = {"tokens": common_pb2.SampledTokens, "token_logprobs": list}
    return Turn(message=message, sampled=sampled, **columns, **fields)


@pytest.mark.parametrize(
    ("changes", "reason", "sequence"),
    [
        ({}, "end_turn", None),
        ({"stop_text": "STOP"}, "stop_sequence", "STOP"),
        ({"finish_reason": common_pb2.FINISH_REASON_LENGTH}, "max_tokens", None),
        (
            {"finish_reason": common_pb2.FINISH_REASON_LENGTH, "prompt_tokens": 99},
            "model_context_window_exceeded",
            None,
        ),
    ],
)
def test_finish_reasons_map_to_anthropic_stop_reasons(
    changes: dict[str, Any], reason: str, sequence: str | None
) -> None:
    """Why an answer ended, in Anthropic's words."""
    ended = ending(turn_of(Message(role="assistant", content="x"), **changes), 100)
    assert ended == {"stop_reason": reason, "stop_sequence": sequence}


def test_arguments_are_written_as_strict_json() -> None:
    """Every client can parse them; strict ones keep their spelling."""
    assert input_json('{"a":  1.0}') == '{"a":  1.0}'
    assert json.loads(input_json('{"a": [NaN, 1e999], "b": "x\\ud83d"}')) == {
        "a": [None, None],
        "b": "x\ufffd",
    }


printed = st.text("ab \n<é日🙂", max_size=6)
deltas_of_answers = st.lists(
    st.builds(lambda t: TextDelta(text=t), printed.filter(bool))
    | st.builds(lambda t: ReasoningDelta(text=t), printed.filter(bool))
    | st.builds(
        lambda value: CallDelta(name="look", arguments=json.dumps(value), call_id="c"),
        st.dictionaries(printed, st.integers() | st.floats(allow_nan=False, allow_infinity=False)),
    ),
    max_size=8,
)


@settings(deadline=None)
@given(deltas_of_answers, st.sampled_from(Shown))
def test_returned_answer_agrees_with_the_recorded_one(deltas: list[Delta], shown: Shown) -> None:
    """Streamed or whole."""
    recorded = recorded_of(deltas)
    blocks = Blocks(shown)
    events = [event for delta in deltas for event in blocks.add_delta(delta)] + [*blocks.finish()]
    whole = json.loads(msgspec.json.encode(content_of(turn_of(recorded), shown)))
    for content in (accumulated(events), whole):
        echoed = sent_back(content)
        assert echoed.key == recorded.key
        assert agree(recorded, echoed)
        assert echoed.call_ids == recorded.call_ids
        thoughts = [block for block in content if block["type"] == "thinking"]
        assert bool(thoughts) == (bool(recorded.reasoning) and shown is not Shown.NOTHING)
        assert {block["signature"] for block in thoughts} <= {SIGNATURE}


def sent_back(content: list[dict[str, Any]]) -> Message:
    """What the gateway reads when an agent sends these blocks as the assistant's."""
    messages = [{"role": "assistant", "content": content}, {"role": "user", "content": "go on"}]
    body = {"model": "policy", "max_tokens": 10, "messages": messages}
    return messages_of(decode(json.dumps(body).encode(), schema.MessagesRequest))[0]


def recorded_of(deltas: list[Delta]) -> Message:
    """The message that a session records for these deltas."""
    calls = [delta for delta in deltas if isinstance(delta, CallDelta)]
    return Message(
        role="assistant",
        content="".join(delta.text for delta in deltas if isinstance(delta, TextDelta)),
        # A parser gives reasoning in one piece of the answer only.
        reasoning="\n\n".join(thoughts(deltas)),
        tool_calls=tuple(
            ToolCall(name=call.name, arguments=call.arguments, call_id=call.call_id)
            for call in calls
        ),
    )


def thoughts(deltas: list[Delta]) -> list[str]:
    """Reasoning, by the blocks that a stream makes of it."""
    found: list[str] = []
    before: Delta | None = None
    for delta in deltas:
        if isinstance(delta, ReasoningDelta):
            if not isinstance(before, ReasoningDelta):
                found.append("")
            found[-1] += delta.text
        before = delta
    return found


def accumulated(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The blocks as a client puts them together; asserts that they come in order."""
    blocks: list[dict[str, Any]] = []
    is_open = False
    for event in events:
        assert event["index"] == len(blocks) - (event["type"] != "content_block_start")
        assert is_open != (event["type"] == "content_block_start")
        match event["type"]:
            case "content_block_start":
                is_open = True
                blocks.append(dict(event["content_block"]))
            case "content_block_stop":
                is_open = False
            case _:
                fill(blocks[-1], event["delta"])
    assert not is_open
    return blocks


def fill(block: dict[str, Any], delta: dict[str, Any]) -> None:
    match delta["type"]:
        case "text_delta":
            block["text"] += delta["text"]
        case "thinking_delta":
            block["thinking"] += delta["thinking"]
        case "signature_delta":
            block["signature"] = delta["signature"]
        case "input_json_delta":
            block["input"] = json.loads(delta["partial_json"])
