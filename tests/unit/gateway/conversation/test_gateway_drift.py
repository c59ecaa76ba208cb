"""No drift for any agent: the trained ids are the sampled ids, token for token.

Random agents fork, edit, cut and summarize their histories, sample in parallel, respell calls and
drop reasoning; random models sample any text, in tokens that no tokenizer would choose.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from forge.core.conversation.messages import Message
from forge.core.errors import InvalidArgument
from forge.core.token_columns import int32_bytes
from services.gateway.conversation.conversation import Conversation
from services.gateway.conversation.prompt import PromptDraft
from tests.support.gateway.chat_templates import FAMILIES
from tests.support.gateway.conversations import TOOLS, Session
from tests.support.gateway.wild_agents import WildAgent

seeds = st.integers(0, 2**32 - 1)


def wild(family: str, seed: int) -> WildAgent:
    random = Random(seed)
    return WildAgent(session=Session(family, tools=random.choice((TOOLS, []))), random=random)


def moved(agent: WildAgent) -> list[Message] | None:
    """One move; None if the template refuses what the agent has made of its history."""
    try:
        history = agent.move()
    except InvalidArgument as refused:
        assert "chat template refuses" in str(refused)
        return None
    note(f"{agent.session.how[-1]}: {history} -> {agent.histories[-1][-1]}")
    return history


@pytest.mark.parametrize("family", sorted(FAMILIES))
@given(seed=seeds, moves=st.integers(1, 12))
@settings(max_examples=25, deadline=None)
def test_trainer_reads_the_sampled_tokens(family: str, seed: int, moves: int) -> None:
    """Composed along parents and prefixes, every turn is its prompt and its samples, with their
    log-probs and versions; a continued prompt has the whole sequence that it continues."""
    agent = wild(family, seed)
    session = agent.session
    for _ in range(moves):
        history = moved(agent)
        if history is None:
            continue
        sent, how, record = session.sent[-1], session.how[-1], session.turns[-1]
        if how == "continued":
            whole = [a + b for a, b in zip(session.sent[:-1], session.sampled[:-1], strict=True)]
            assert any(sent.startswith(sequence) for sequence in whole)
            parent = whole[record.parent_turn]
            assert sent.startswith(parent[: record.prefix_tokens * 4])
        if how == "repeated":
            assert not record.prompt_ids
            assert sent in session.sent[:-1]
        if how == "first":
            text = session.template(history)
            assert session.model.encode(text) == sent[: len(session.model.encode(text))]
    session.check_record()


@pytest.mark.parametrize("family", sorted(FAMILIES))
@given(seed=seeds, before=st.integers(1, 6), after=st.integers(1, 4))
@settings(max_examples=15, deadline=None)
def test_another_gateway_continues_a_conversation_unchanged(
    family: str, seed: int, before: int, after: int
) -> None:
    """Rebuilt from its recorded turns, a conversation makes the same drafts as the lost one, and
    records the same turns."""
    agent = wild(family, seed)
    session = agent.session
    for _ in range(before):
        moved(agent)
    elsewhere = session.restored()
    for _ in range(after):
        # Copies, as a wire makes them: only what a gateway itself recalls is one of its nodes'.
        request = [replace(message) for message in agent.next_request()]
        here, there = (
            drafted(conversation, session, request)
            for conversation in (session.conversation, elsewhere)
        )
        if here is None or there is None:
            assert here is there
            continue
        assert (here.how, here.ids, here.text) == (there.how, there.ids, there.text)
        text = agent.spoken("")
        ids = session.spelt(text, by_character=True)
        answer = session.parse(session.whole(here), "", ids)
        twin = elsewhere.record(session.whole(there), session.sample(ids, answer))
        session.record(session.whole(here), ids, answer)
        assert twin == session.turns[-1]
        agent.histories.append([*request, answer])
    session.check_record()


def drafted(
    conversation: Conversation, session: Session, request: list[Message]
) -> PromptDraft | None:
    """A prompt for the request; None if the template refuses it."""
    try:
        return conversation.draft(request, session.tools)
    except InvalidArgument:
        return None


@given(seed=seeds, moves=st.integers(1, 6))
@settings(max_examples=60, deadline=None)
def test_prompts_given_as_ids_share_their_prefix(seed: int, moves: int) -> None:
    """A white-box call whose ids extend an earlier turn's stores only the new ones, from any place
    in that turn; chat turns can follow."""
    agent = wild("qwen3", seed)
    session, random = agent.session, agent.random
    for _ in range(moves):
        moved(agent)
        at = random.randrange(len(session.turns))
        sequence = session.sent[at] + session.sampled[at]
        kept = random.randrange(1, len(sequence) // 4 + 1)
        new = [
            random.randrange(session.model.vocabulary_tokens) for _ in range(random.randrange(4))
        ]
        session.generate(
            sequence[: kept * 4] + int32_bytes(new), int32_bytes([random.randrange(9)])
        )
        record = session.turns[-1]
        assert record.prefix_tokens >= kept
        assert len(record.prompt_ids) // 4 <= len(new)
        assert not record.messages_json
    session.check_record()
    assert session.restored().turns == len(session.turns)
