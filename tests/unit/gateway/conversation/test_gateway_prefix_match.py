"""Requests held against the tree: as JSON, recognized by marks, or as messages, read whole."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forge.core.conversation.messages import Message
from forge.core.token_columns import float32_bytes, int32_bytes
from forge.v1 import common_pb2
from services.gateway.conversation.conversation import Conversation
from services.gateway.conversation.prompt import Prompt, SampledAnswer
from services.gateway.http.openai.completions import chat_schema
from services.gateway.http.request_fields import request_body
from tests.support.gateway.chat_templates import make_model

SAID = Message(role="assistant", content="1")

texts = st.sampled_from(["a", "b", " a", "No.", ""])
steps = st.tuples(
    st.integers(0, 5),  # which history to continue
    st.integers(0, 4),  # which message of it to edit; most often none
    texts,  # what is said
    texts,  # what the model answers
    st.sampled_from(["", "hm"]),  # what it thinks
    st.booleans(),  # whether the agent sends the thought back
)


def encoded(plain: list[dict[str, Any]]) -> Any:
    body = json.dumps({"model": "policy", "messages": plain}).encode()
    return chat_schema.messages_of(request_body.decode(body, chat_schema.ChatCompletionRequest))


def answered(conversation: Conversation, messages: Any, answer: Message) -> tuple[Any, bytes]:
    draft = conversation.draft(messages, ())
    prompt = Prompt(ids=draft.ids + conversation.model.encode(draft.text), draft=draft)
    ids = conversation.model.encode(answer.content)
    count = len(ids) // 4
    sampled = SampledAnswer(
        columns=common_pb2.SampledTokens(
            ids=ids,
            logprobs=float32_bytes([-0.5] * count),
            weight_versions=int32_bytes([3] * count),
        ),
        finish_reason=common_pb2.FINISH_REASON_STOP,
        answer=answer,
    )
    return conversation.record(prompt, sampled), prompt.ids


@pytest.mark.parametrize("family", ["chatml", "qwen3", "numbered"])
@given(plan=st.lists(steps, min_size=1, max_size=8))
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_marks_do_not_change_prompts(family: str, plan: list[Any]) -> None:
    """Prompts and records are the same whether a request is recognized or read from the start."""
    model = make_model(family)
    marked, plain = Conversation(model=model), Conversation(model=model)
    histories: list[list[dict[str, Any]]] = [[]]
    for which, edit, said, text, thought, sent_back in plan:
        history = [dict(message) for message in histories[which % len(histories)]]
        if edit < len(history):
            history[edit]["content"] += "!"
        history.append({"role": "user", "content": said})
        answer = Message(role="assistant", content=text, reasoning=thought)
        whole = encoded(history)[:]
        assert answered(marked, encoded(history), answer) == answered(plain, whole, answer)
        back = {"role": "assistant", "content": text}
        histories.append([*history, back | ({"reasoning_content": thought} if sent_back else {})])


def test_only_new_messages_are_decoded() -> None:
    """The second turn of a conversation decodes the messages that the agent added."""
    conversation = Conversation(model=make_model("chatml"))
    history = [{"role": "user", "content": "One?"}]
    answered(conversation, encoded(history), Message(role="assistant", content="1"))
    history += [{"role": "assistant", "content": "1"}, {"role": "user", "content": "Two?"}]
    request = encoded(history)
    draft = conversation.draft(request, ())
    assert draft.how == "continued"
    assert request._all is None
    assert [message.content for message in request._behind[1]] == ["1", "Two?"]


def test_call_is_recorded_in_a_rebuilt_conversation() -> None:
    """A session rebuilt from the pool during a call records that call in its new tree."""
    model = make_model("chatml")
    first = Conversation(model=model)
    stored, _ = answered(first, encoded([{"role": "user", "content": "One?"}]), SAID)
    later = [
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "1"},
        {"role": "user", "content": "Two?"},
    ]
    draft = first.draft(encoded(later), ())
    prompt = Prompt(ids=draft.ids + model.encode(draft.text), draft=draft)
    second = Conversation(model=model)
    second.restore(stored)
    sampled = SampledAnswer(
        columns=common_pb2.SampledTokens(ids=model.encode("2"), logprobs=b"", weight_versions=b""),
        finish_reason=common_pb2.FINISH_REASON_STOP,
        answer=Message(role="assistant", content="2"),
    )
    turn = second.record(prompt, sampled)
    assert turn == first.record(prompt, sampled)
    assert (turn.turn_index, turn.parent_turn) == (1, 0)
