"""Turns of other models in a session: in its order, outside of its contexts."""

from __future__ import annotations

import json
from collections.abc import Sequence

from forge.core.conversation.messages import Message
from forge.core.token_columns import float32_bytes, int32_bytes
from forge.core.trajectory import NO_PARENT
from forge.v1 import common_pb2
from services.gateway.conversation.agent_time import Moment
from services.gateway.conversation.other_turns import answered_turn, append_other
from services.gateway.conversation.prompt import Prompt, SampledAnswer, given
from services.gateway.conversation.rebase import rebase
from services.gateway.conversation.turn_request import TurnRequest
from services.gateway.model.other_model import OtherModel
from tests.support.gateway.chat_templates import make_model
from tests.support.gateway.conversations import Session, user
from tests.support.pool.records import recorded_tree

MODEL = make_model("llama3")


def judge(recorded_bytes: int = 1 << 16) -> OtherModel:
    return OtherModel(name="judge", kind="engine", model=MODEL, recorded_bytes=recorded_bytes)


def answered(
    messages: Sequence[Message], text: str, *, recorded_bytes: int = 1 << 16, parsed: bool = True
) -> common_pb2.Turn:
    """The record of one answer of a judge."""
    ids = MODEL.encode(text)
    count = len(ids) // 4
    request = TurnRequest(
        messages=messages,
        sampling=common_pb2.SamplingParams(temperature=0.25),
        arrived=Moment(at_s=0.0, unix_s=0.0),
    )
    sampled = SampledAnswer(
        columns=common_pb2.SampledTokens(
            ids=ids,
            logprobs=float32_bytes([-0.5] * count),
            weight_versions=int32_bytes([1] * count),
        ),
        finish_reason=common_pb2.FINISH_REASON_STOP,
        answer=Message(role="assistant", content=text) if parsed else None,
    )
    prompt = Prompt(ids=bytes(20), draft=given(bytes(20)))
    return answered_turn(judge(recorded_bytes), request, prompt, sampled)


def test_other_turns_leave_the_policys_contexts_as_they_are() -> None:
    """Its turns have the same prompts, sources and shared prefixes as without them."""
    plain, mixed = Session("chatml"), Session("chatml")
    history = [user("one")]
    for number, text in enumerate(("two", "four", "six")):
        for session in (plain, mixed):
            answer = session.turn(history, text, by_character=True)
        for _ in range(number + 1):
            assert append_other(mixed.conversation, answered([user("?")], "fine")) >= 0
        history = [*history, answer, user(f"{number}")]
    assert (mixed.sent, mixed.how) == (plain.sent, plain.how)
    assert [turn.prefix_tokens for turn in mixed.turns] == [
        turn.prefix_tokens for turn in plain.turns
    ]
    assert [turn.turn_index for turn in mixed.turns] == [0, 2, 5]
    assert [turn.parent_turn for turn in mixed.turns] == [NO_PARENT, 0, 2]


def test_session_is_restored_with_other_turns() -> None:
    """A later request continues the policy's answer, and the numbers go on."""
    session = Session("chatml")
    first = session.turn([user("one")], "two", by_character=True)
    turns = [session.turns[0], answered([user("?")], "fine")]
    turns[1].turn_index = 1
    restored, unstored = rebase(session.model, turns, [])
    assert (restored.turns, unstored) == (2, [])
    session.conversation = restored
    session.turn([user("one"), first, user("three")], "four")
    assert session.how[-1] == "continued"
    assert (session.turns[-1].turn_index, session.turns[-1].parent_turn) == (2, 0)


def test_other_turn_is_renumbered_behind_those_of_another_gateway() -> None:
    """Its record stays; the tree of all turns is whole."""
    here, there = Session("chatml"), Session("chatml")
    there.turn([user("one")], "two")
    waiting = answered([user("?")], "fine")
    append_other(here.conversation, waiting)
    here.turn([user("five")], "six")
    stored = there.turns[0]
    _, moved = rebase(here.model, [stored], [waiting, here.turns[0]])
    assert [turn.turn_index for turn in moved] == [1, 2]
    assert moved[0].other_model == waiting.other_model
    assert moved[0].messages_json == waiting.messages_json
    tree = recorded_tree([stored, *moved])
    assert tree.lengths[1] == 0
    assert tree.context(2) == here.sent[0]


def test_record_has_the_last_messages_that_fit() -> None:
    """A whole history in each of its turns would be stored again and again."""
    messages = [user(f"message {number} " + "x" * 100) for number in range(50)]
    turn = answered(messages, "fine", recorded_bytes=1000)
    record = json.loads(turn.messages_json)
    assert [one["content"][:10] for one in record["messages"]] == [
        f"message {number}" for number in range(50 - len(record["messages"]), 50)
    ]
    assert 2 < len(record["messages"]) < 10
    assert record["omitted_messages"] == 50 - len(record["messages"])
    assert "omitted_messages" not in json.loads(answered(messages, "fine").messages_json)
    assert (turn.other_model.prompt_tokens, turn.temperature) == (5, 0.25)
    assert (turn.prompt_ids, turn.sampled.ids) == (b"", b"")


def test_answer_over_token_ids_is_recorded_as_text() -> None:
    """Of the model's own vocabulary, which viewers do not have."""
    record = json.loads(answered([], "fine", parsed=False).messages_json)
    assert record == {"messages": [], "answer": {"role": "assistant", "content": "fine"}}
