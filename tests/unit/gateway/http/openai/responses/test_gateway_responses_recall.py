"""Turns with a name: found again by it, in this gateway and in the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forge.core.conversation.messages import Message
from forge.core.token_columns import float32_bytes, int32_bytes
from forge.v1 import common_pb2
from services.gateway.conversation.conversation import Conversation
from services.gateway.conversation.handles import Handle, Recalled
from services.gateway.conversation.prefix_match import NamedPrefix
from services.gateway.conversation.prompt import Prompt, SampledAnswer
from tests.support.gateway.chat_templates import make_model

MODEL = make_model("chatml")
TOOLS = [{"type": "function", "function": {"name": "look"}}]
HI = Message(role="user", content="hi")


@dataclass
class World:
    """A conversation, and what a pool would keep of it."""

    conversation: Conversation = field(default_factory=lambda: Conversation(model=MODEL))
    turns: list[common_pb2.Turn] = field(default_factory=list)

    def turn(self, messages: Sequence[Message], pieces: list[str], name: str | None) -> None:
        draft = self.conversation.draft(messages, TOOLS)
        prompt = Prompt(ids=draft.ids + MODEL.encode(draft.text), draft=draft)
        ids = b"".join(map(MODEL.encode, pieces)) + int32_bytes(sorted(MODEL.stop_ids)[:1])
        sampled = SampledAnswer(
            columns=common_pb2.SampledTokens(
                ids=ids,
                logprobs=float32_bytes([-0.5] * (len(ids) // 4)),
                weight_versions=int32_bytes([3] * (len(ids) // 4)),
            ),
            finish_reason=common_pb2.FINISH_REASON_STOP,
            answer=Message(role="assistant", content="".join(pieces)),
            cached_tokens=2,
        )
        handle = Handle(name=name, facts={"of": name}) if name else None
        self.turns.append(self.conversation.record(prompt, sampled, handle))

    def read_back(self) -> World:
        """The same in a gateway that knows only what was recorded."""
        other = World(turns=[common_pb2.Turn.FromString(t.SerializeToString()) for t in self.turns])
        for turn in other.turns:
            other.conversation.restore(turn)
        return other

    def recall(self, name: str) -> Recalled:
        recalled = self.conversation.recall(name)
        assert recalled is not None
        return recalled


def test_named_turn_is_recalled_whole() -> None:
    """Messages, tools, tokens and facts: from memory and from the record."""
    world = World()
    world.turn([HI], ["yes"], "a")
    for place in (world, world.read_back()):
        recalled = place.recall("a")
        assert [message.content for message in recalled.node.messages()] == ["hi", "yes"]
        assert recalled.tools == TOOLS
        assert (recalled.turn.facts, recalled.turn.cached_tokens) == ({"of": "a"}, 2)
        assert recalled.turn.finish_reason == common_pb2.FINISH_REASON_STOP
        assert recalled.sampled_ids == world.turns[0].sampled.ids
        assert recalled.prompt_tokens == len(world.turns[0].prompt_ids) // 4


def test_unknown_response_ids_find_no_turn() -> None:
    """And a turn without an id is not found."""
    world = World()
    world.turn([HI], ["yes"], None)
    assert world.conversation.recall("") is None
    assert world.conversation.recall("a") is None


def test_recalled_answer_is_distinguished_from_an_equal_text() -> None:
    """Of parallel answers with one text, the named one is continued with its sampled tokens."""
    world = World()
    spellings = {"a": ["the"], "b": ["t", "h", "e"], "c": ["the"]}
    for name, pieces in spellings.items():
        world.turn([HI], pieces, name)
    assert world.turns[0].sampled.ids != world.turns[1].sampled.ids
    for place in (world, world.read_back()):
        for turn, name in enumerate(spellings):
            history = [*place.recall(name).node.messages(), Message(role="user", content="more")]
            draft = place.conversation.draft(history, TOOLS)
            assert draft.ids.endswith(world.turns[turn].sampled.ids)


class Unread(NamedPrefix):
    """Whoever looks at what was there before fails."""

    def __getitem__(self, at: Any) -> Any:
        raise AssertionError("read whole")


@given(
    plan=st.lists(
        st.tuples(
            st.integers(0, 9),  # which turn to go on from
            st.sampled_from(["a", "b", ""]),  # what is said
            st.lists(st.sampled_from(["the", "t", "h", "e"]), max_size=3),  # what is answered
            st.booleans(),  # whether the session is read back first
        ),
        max_size=8,
    )
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_request_that_names_a_turn_continues_its_tokens(plan: list[Any]) -> None:
    """Not another's with the same text, and its earlier messages are not decoded."""
    world = World()
    world.turn([HI], ["yes"], "0")
    for number, (which, said, pieces, again) in enumerate(plan, 1):
        if again:
            world = world.read_back()
        turn = which % number
        request = Unread(world.recall(str(turn)).node, [Message(role="user", content=said)])
        draft = world.conversation.draft(request, TOOLS)
        assert draft.ids.startswith(world.conversation.prefixes.sequence(turn))
        world.turn(request, pieces, str(number))
        assert world.conversation.prefixes.prompt(number).startswith(draft.ids)


@pytest.mark.parametrize("family", ["chatml", "qwen3", "numbered"])
def test_named_turn_and_sent_messages_give_the_same_prompt(family: str) -> None:
    """Also if a template rewrites history, and all of it must be decoded."""
    conversation = Conversation(model=make_model(family))
    World(conversation=conversation).turn([HI], ["<think>hm</think>", "yes"], "a")
    recalled = conversation.recall("a")
    assert recalled is not None
    following = NamedPrefix(recalled.node, [HI])
    assert len(following) == 3
    assert following[:] == [*recalled.node.messages(), HI]
    named, whole = (conversation.draft(each, TOOLS) for each in (following, following[:]))
    assert (named.how, named.ids, named.text) == (whole.how, whole.ids, whole.text)


def test_rebuilt_session_finds_a_named_turn() -> None:
    """Its name pointed into the old tree: in the new one the turn is found by its messages."""
    world = World()
    world.turn([HI], ["yes"], "a")
    before = NamedPrefix(world.recall("a").node, [HI])
    draft = world.read_back().conversation.draft(before, TOOLS)
    assert draft.how == "continued"
    assert draft.ids.endswith(world.turns[0].sampled.ids)
