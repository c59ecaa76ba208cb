"""Items of Responses requests, recognized by marks or read whole: the same prompts and records."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forge.core.conversation.messages import Message, ToolCall
from forge.core.errors import InvalidArgument
from forge.core.token_columns import float32_bytes, int32_bytes
from forge.v1 import common_pb2
from services.gateway.conversation.conversation import Conversation
from services.gateway.conversation.prompt import Prompt, SampledAnswer
from services.gateway.http.openai.responses.history import history_of, messages_of
from tests.support.gateway.chat_templates import make_model

steps = st.tuples(
    st.integers(0, 3),  # which history to go on from
    st.sampled_from(["Yes.", ""]),  # what the model says
    st.integers(0, 2),  # how many tools it calls
    st.booleans(),  # whether items carry their ids
    st.booleans(),  # whether each result stands behind its call
    st.booleans(),  # whether a request comes before all results are there
    st.integers(0, 6),  # which item to edit; most often none
)


def items_of_turn(
    number: int, said: str, calls: int, with_ids: bool, interleaved: bool
) -> list[dict[str, Any]]:
    """An answer as a client sends it back, with the results."""
    ids = {"id": f"msg_{number:032x}_0"} if with_ids else {}
    items: list[dict[str, Any]] = []
    if said:
        items.append({"type": "message", "role": "assistant", "content": said, **ids})
    results: list[Any] = []
    for at in range(calls):
        call_id = f"call-{number}-{at}"
        call = {"type": "function_call", "call_id": call_id, "name": "look", "arguments": "{}"}
        items.append(call | ({"id": f"fc_{number:032x}_{at + 1}"} if with_ids else {}))
        result = {"type": "function_call_output", "call_id": call_id, "output": f"seen {at}"}
        (items if interleaved else results).append(result)
    return items + results


def answered(conversation: Conversation, messages: Any, answer: Message) -> tuple[Any, bytes]:
    draft = conversation.draft(messages, ())
    prompt = Prompt(ids=draft.ids + conversation.model.encode(draft.text), draft=draft)
    ids = conversation.model.encode(answer.content or "x")
    sampled = SampledAnswer(
        columns=common_pb2.SampledTokens(
            ids=ids,
            logprobs=float32_bytes([-0.5] * (len(ids) // 4)),
            weight_versions=int32_bytes([3] * (len(ids) // 4)),
        ),
        finish_reason=common_pb2.FINISH_REASON_STOP,
        answer=answer,
    )
    return conversation.record(prompt, sampled), prompt.ids


@pytest.mark.parametrize("instructions", [None, "Be brief."])
@given(plan=st.lists(steps, min_size=1, max_size=7))
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_marks_do_not_change_prompts(instructions: str | None, plan: list[Any]) -> None:
    """For any items of one message, also across the end of an earlier request."""
    model = make_model("chatml")
    marked, plain = Conversation(model=model), Conversation(model=model)
    before = [Message(role="system", content=instructions)] if instructions else []
    histories: list[list[dict[str, Any]]] = [[{"role": "user", "content": "Well?"}]]

    def turn(items: list[dict[str, Any]], answer: Message) -> None:
        history = history_of(json.dumps(items).encode(), instructions)
        whole = [*before, *messages_of(items)]
        assert answered(marked, history, answer) == answered(plain, whole, answer)

    for number, (which, said, calls, with_ids, interleaved, early, edit) in enumerate(plan):
        items = [dict(item) for item in histories[which % len(histories)]]
        if edit < len(items) and "content" in items[edit]:
            items[edit]["content"] += "!"
        made = [
            ToolCall(name="look", arguments="{}", call_id=f"call-{number}-{at}")
            for at in range(calls)
        ]
        turn(items, Message(role="assistant", content=said, tool_calls=tuple(made)))
        items += items_of_turn(number, said, calls, with_ids, interleaved)
        if early and len(items) > 1:
            turn(items[:-1], Message(role="assistant", content="Early."))
        histories.append(items if calls else [*items, {"role": "user", "content": "And?"}])


def call(at: int, key: str = "") -> dict[str, Any]:
    ids = {"id": f"fc_{key}_{at}"} if key else {}
    made = {"type": "function_call", "call_id": f"c{at}", "name": "look", "arguments": "{}"}
    return made | ids


def result(at: int) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": f"c{at}", "output": "seen"}


USER = {"role": "user", "content": "Well?"}


@pytest.mark.parametrize(
    ("first", "more"),
    [
        # The answer that the first request ends with grows.
        ([USER, {"role": "assistant", "content": "Yes."}], [call(0), result(0)]),
        # A second call of an answer whose first call has its result already.
        ([USER, call(0, "a" * 32), result(0)], [call(1, "a" * 32), result(1)]),
    ],
)
def test_answer_that_continues_over_a_mark_is_one_message(
    first: list[dict[str, Any]], more: list[dict[str, Any]]
) -> None:
    """The mark is then not used: the request is decoded from the start."""
    marked, plain = (Conversation(model=make_model("chatml")) for _ in range(2))
    said = Message(role="assistant", content="1")
    for items in (first, [*first, *more]):
        request = history_of(json.dumps(items).encode(), None)
        assert answered(marked, request, said) == answered(plain, messages_of(items), said)


def test_only_new_items_are_decoded() -> None:
    """The second turn of a conversation decodes the items that the agent added."""
    conversation = Conversation(model=make_model("chatml"))
    items: list[dict[str, Any]] = [{"role": "user", "content": "One?"}]
    answer = Message(role="assistant", content="1")
    answered(conversation, history_of(json.dumps(items).encode(), "Brief."), answer)
    items += [{"role": "assistant", "content": "1"}, {"role": "user", "content": "Two?"}]
    request: Any = history_of(json.dumps(items).encode(), "Brief.")
    assert conversation.draft(request, ()).how == "continued"
    assert request._all is None
    assert [message.content for message in request._behind[1]] == ["1", "Two?"]
    wrong = json.dumps([*items, {"type": "unheard_of"}]).encode()
    with pytest.raises(InvalidArgument, match=r"input\[3\]: items of type 'unheard_of'"):
        conversation.draft(history_of(wrong, "Brief."), ())


def test_new_item_nested_too_deeply_is_refused() -> None:
    """Also behind a recognized prefix."""
    conversation = Conversation(model=make_model("chatml"))
    first = b'[{"role":"user","content":"One?"}'
    answered(conversation, history_of(first + b"]", None), Message(role="assistant", content="1"))
    deep = b"[" * 100_000 + b"]" * 100_000
    request = b'%s,{"role":"assistant","content":"1"},{"role":"user","content":%s}]' % (first, deep)
    with pytest.raises(InvalidArgument, match="input"):
        conversation.draft(history_of(request, None), ())


@pytest.mark.parametrize("given_input", [b"null", b"[]", b"3", b"[3]", b'{"a": 1}'])
@pytest.mark.parametrize("instructions", [None, "Brief."])
def test_missing_or_invalid_input_is_refused(given_input: bytes, instructions: str | None) -> None:
    """With instructions or without; the error names the field."""
    conversation = Conversation(model=make_model("chatml"))
    with pytest.raises(InvalidArgument, match="input"):
        conversation.draft(history_of(given_input, instructions), ())
