"""Two gateways in one session: what each recorded ends up in one order, once, and exact."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forge.core.conversation.messages import Message
from forge.core.errors import DataLoss
from forge.core.token_columns import float32_bytes, int32_bytes
from forge.v1 import common_pb2
from services.gateway.conversation.conversation import Conversation
from services.gateway.conversation.handles import Handle
from services.gateway.conversation.prompt import Prompt, SampledAnswer
from services.gateway.conversation.rebase import rebase
from tests.support.gateway.chat_templates import make_model
from tests.support.pool.records import recorded_tree

MODEL = make_model("chatml")


def user(text: str) -> Message:
    return Message(role="user", content=text)


@dataclass
class Gateway:
    """One gateway's copy of the session."""

    name: str
    conversation: Conversation = field(default_factory=lambda: Conversation(model=MODEL))
    waiting: list[common_pb2.Turn] = field(default_factory=list)

    def turn(self, history: list[Message], text: str) -> tuple[bytes, bytes, Message]:
        """One call; what the engine was sent and sampled, and the answer."""
        draft = self.conversation.draft(history, ())
        prompt = Prompt(ids=draft.ids + MODEL.encode(draft.text), draft=draft)
        ids = b"".join(MODEL.encode(char) for char in text) + int32_bytes(MODEL.stop_ids)
        sampled = SampledAnswer(
            columns=common_pb2.SampledTokens(
                ids=ids,
                logprobs=float32_bytes([-0.5] * (len(ids) // 4)),
                weight_versions=int32_bytes([1] * (len(ids) // 4)),
            ),
            finish_reason=common_pb2.FINISH_REASON_STOP,
            answer=Message(role="assistant", content=text),
            engine="vllm",
        )
        handle = Handle(name=f"{self.name}-{self.conversation.turns}", facts={"by": self.name})
        turn = self.conversation.record(prompt, sampled, handle)
        turn.trajectory_id, turn.temperature = "t:0:0", 0.5
        self.waiting.append(turn)
        return prompt.ids, ids, Message(role="assistant", content=text)

    def send(self, stored: list[common_pb2.Turn]) -> None:
        """Offers the pool the first turn that waits, and reads again when its number is taken."""
        if not self.waiting:
            return
        turn = self.waiting[0]
        if turn.turn_index < len(stored) and stored[turn.turn_index] != turn:
            self.conversation, self.waiting = rebase(MODEL, stored, self.waiting)
            turn = self.waiting[0]
        assert turn.turn_index == len(stored)
        stored.append(self.waiting.pop(0))


steps = st.lists(
    st.tuples(
        st.integers(0, 1),  # which gateway
        st.integers(0, 3),  # which history to continue
        st.sampled_from(["a", "b c"]),  # what is said
        st.sampled_from(["1", "ab", "b c"]),  # what is answered
        st.lists(st.integers(0, 1), max_size=3),  # who sends to the pool then
    ),
    min_size=1,
    max_size=10,
)


@given(steps)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_interleaved_gateways_record_each_call_once(plan: list[Any]) -> None:
    """For any interleaving of calls and appends of two gateways, the stored turns are a tree with
    every call exactly once."""
    gateways = [Gateway("a"), Gateway("b")]
    stored: list[common_pb2.Turn] = []
    made: list[tuple[bytes, bytes]] = []
    histories: list[list[Message]] = [[]]
    for which, onward, said, text, senders in plan:
        history = [*histories[onward % len(histories)], user(said)]
        prompt, sampled, answer = gateways[which].turn(history, text)
        made.append((prompt, sampled))
        histories.append([*history, answer])
        for sender in senders:
            gateways[sender].send(stored)
    while any(gateway.waiting for gateway in gateways):
        for gateway in gateways:
            gateway.send(stored)
    tree = recorded_tree(stored)
    recorded = [(tree.context(at), turn.sampled_ids) for at, turn in enumerate(tree.turns)]
    assert sorted(recorded) == sorted(made)
    assert {(turn.temperature, turn.engine) for turn in stored} == {(0.5, "vllm")}
    restored, left = rebase(MODEL, stored, [])
    assert (restored.turns, left) == (len(made), [])


def test_turns_stored_meanwhile_are_not_sent_again() -> None:
    """A turn that the pool has, byte for byte, lacks only its acknowledgement."""
    gateway = Gateway("a")
    gateway.turn([user("One?")], "1")
    gateway.turn([user("Two?")], "2")
    conversation, left = rebase(MODEL, gateway.waiting[:1], gateway.waiting)
    assert left == gateway.waiting[1:]
    assert conversation.turns == 2


def test_handle_finds_its_renumbered_turn() -> None:
    """A name given to a turn finds it under its new number."""
    first, second = Gateway("a"), Gateway("b")
    first.turn([user("One?")], "1")
    second.turn([user("Two?")], "2")
    conversation, (turn,) = rebase(MODEL, first.waiting, second.waiting)
    assert turn.turn_index == 1
    recalled = conversation.recall("b-0")
    assert recalled is not None
    assert recalled.turn.turn_index == 1
    assert recalled.turn.facts == {"by": "b"}


def test_renumbered_turn_has_no_time() -> None:
    """The turns before it ended in another gateway; a turn that keeps its number keeps its time."""
    first, second = Gateway("a"), Gateway("b")
    first.turn([user("One?")], "1")
    second.turn([user("Two?")], "2")
    second.waiting[0].turns_before = 0
    _, (moved,) = rebase(MODEL, first.waiting, second.waiting)
    assert not moved.HasField("turns_before")
    _, (kept,) = rebase(MODEL, [], second.waiting)
    assert kept.HasField("turns_before")


def test_missing_acknowledged_turns_are_data_loss() -> None:
    """A pool that lost acknowledged turns gets no further ones."""
    gateway = Gateway("a")
    for text in ("One?", "Two?"):
        gateway.turn([user(text)], "1")
    with pytest.raises(DataLoss, match="turn 0 was acknowledged"):
        rebase(MODEL, [], gateway.waiting[1:])
