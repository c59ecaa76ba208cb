"""Exact tokens: prompts that continue, repeat and branch, and turns that spell them again."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forge.core.errors import InvalidArgument
from forge.core.formats import collect
from forge.core.messages import Message, ToolCall
from forge.core.trajectory import (
    TokenTree,
    TurnTokens,
    float32_bytes,
    int32_array,
    int32_bytes,
)
from forge.v1 import common_pb2
from services.gateway.conversation import Conversation, Draft, Prompt, Sampled
from tests.support.chat_templates import FAMILIES, make_model, make_tokenizer

TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
]


def user(text: str) -> Message:
    return Message(role="user", content=text)


def result(text: str) -> Message:
    return Message(role="tool", content=text, tool_call_id="call0")


@dataclass
class Session:
    """A conversation together with the engine it talks to."""

    family: str
    tools: list[dict[str, Any]] = field(default_factory=list)
    sent: list[bytes] = field(default_factory=list)
    """Prompt of each turn, as the engine got it."""
    sampled: list[bytes] = field(default_factory=list)
    turns: list[common_pb2.Turn] = field(default_factory=list)
    how: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.model = make_model(self.family)
        self.conversation = Conversation(model=self.model)

    def prompt(self, messages: list[Message], opening: str = "") -> Prompt:
        draft = self.conversation.draft(messages, self.tools, opening=opening)
        return Prompt(ids=draft.ids + self.model.encode(draft.text), draft=draft)

    def turn(
        self,
        messages: list[Message],
        text: str,
        *,
        ended: bool = True,
        by_character: bool = False,
        opening: str = "",
    ) -> Message:
        """One call: the engine says `text`, spelt canonically or one character at a time."""
        prompt = self.prompt(messages, opening)
        pieces = list(text) if by_character else [text]
        ids = b"".join(self.model.encode(piece) for piece in pieces)
        if ended:
            ids += int32_bytes(sorted(self.model.stop_ids)[:1])
        answer = self.parse(opening + text, call_id=f"call{len(self.turns)}")
        self.record(prompt, ids, answer)
        return answer

    def record(self, prompt: Prompt, ids: bytes, answer: Message | None) -> None:
        count = len(ids) // 4
        turn = self.conversation.record(
            prompt,
            Sampled(
                ids=ids,
                logprobs=float32_bytes([-0.5] * count),
                weight_versions=int32_bytes([3] * count),
                finish_reason=common_pb2.FINISH_REASON_STOP,
                answer=answer,
            ),
        )
        self.sent.append(prompt.ids)
        self.sampled.append(ids)
        self.turns.append(turn)
        self.how.append(prompt.draft.how)

    def parse(self, text: str, *, call_id: str) -> Message:
        parser = self.model.format.parser()
        if self.model.reasoning is not None:
            parser = self.model.reasoning.parser(parser, inside=self.model.opens_reasoning)
        answer = collect([*parser.feed(text), *parser.finish()], parser.error)
        calls = tuple(
            ToolCall(name=call.name, arguments=call.arguments, call_id=f"{call_id}-{at}")
            for at, call in enumerate(answer.calls)
        )
        return Message(
            role="assistant", content=answer.content, reasoning=answer.reasoning, tool_calls=calls
        )

    def text(self, ids: bytes) -> str:
        """Text with special tokens."""
        return str(make_tokenizer(self.family).decode(list(int32_array(ids))))

    def template(self, messages: list[Message]) -> str:
        """The template's own rendering."""
        return self.model.renderer(self.tools)(messages, True)

    def check_record(self) -> None:
        """What a trainer rebuilds from the turns is what the engine was sent and sampled."""
        tree = TokenTree(
            [
                TurnTokens(
                    turn_index=turn.turn_index,
                    parent_turn=turn.parent_turn,
                    prefix_tokens=turn.prefix_tokens,
                    prompt_ids=turn.prompt_ids,
                    sampled_ids=turn.sampled.ids,
                    logprobs=turn.sampled.logprobs,
                    weight_versions=turn.sampled.weight_versions,
                )
                for turn in self.turns
            ]
        )
        for index, (sent, sampled) in enumerate(zip(self.sent, self.sampled, strict=True)):
            assert tree.context(index) == sent
            assert tree.turns[index].sampled_ids == sampled
            assert tree.sequence(index) == sent + sampled


LINEAR = ["chatml", "tiny", "smollm2", "llama3", "numbered"]


@pytest.mark.parametrize("family", LINEAR)
def test_appending_continues_the_sampled_ids(family: str) -> None:
    """The next prompt is the last sequence, token for token, and then the new text."""
    session = Session(family)
    history = [Message(role="system", content="Be brief."), user("One?")]
    for number in range(4):
        answer = session.turn(history, f"It is {number}.", by_character=True)
        history = [*history, answer, user(f"And {number}?")]
    assert session.how == ["first", "continued", "continued", "continued"]
    for before, after in zip(session.turns, session.turns[1:], strict=False):
        assert after.parent_turn == before.turn_index
        assert after.prefix_tokens * 4 == len(session.sent[before.turn_index]) + len(
            session.sampled[before.turn_index]
        )
    session.check_record()
    assert session.text(session.sent[-1]) == session.template(history[:-2])


def test_reasoning_that_the_template_drops_makes_a_branch() -> None:
    """Qwen 3 forgets what it thought before the last question: so does the prompt."""
    session = Session("qwen3")
    first = session.turn([user("One?")], "<think>\nhm\n</think>\n\nYes.")
    assert (first.reasoning, first.content) == ("hm", "Yes.")
    history = [user("One?"), replace(first, reasoning=""), user("Two?")]
    session.turn(history, "<think>\nho\n</think>\n\nNo.")
    assert session.how == ["first", "branched"]
    assert session.text(session.sent[1]) == session.template([user("One?"), first, user("Two?")])
    assert "hm" not in session.text(session.sent[1])
    assert session.turns[1].prefix_tokens > 0
    session.check_record()


def test_reasoning_is_kept_where_the_template_keeps_it() -> None:
    """Within one tool loop Qwen 3 remembers, though the agent sent the reasoning nowhere."""
    session = Session("qwen3", tools=TOOLS)
    call = (
        '<think>\nlook it up\n</think>\n\n<tool_call>\n{"name":"look","arguments":{}}\n</tool_call>'
    )
    answer = session.turn([user("One?")], call, by_character=True)
    assert answer.tool_calls[0].name == "look"
    seen = replace(answer, reasoning="", tool_calls=(replace(answer.tool_calls[0], call_id="x"),))
    session.turn([user("One?"), seen, result("42")], "<think>\nfine\n</think>\n\n42.")
    assert session.how == ["first", "continued"]
    assert "look it up" in session.text(session.sent[1])
    session.check_record()


def test_end_of_turn_is_neither_doubled_nor_missing() -> None:
    """Sampled or cut off before it, the end-of-turn token stands there exactly once."""
    for ended in (True, False):
        session = Session("chatml")
        answer = session.turn([user("One?")], "Yes.", ended=ended)
        prompt = session.prompt([user("One?"), answer, user("Two?")])
        assert "Yes.<|im_end|>\n<|im_start|>user\nTwo?" in session.text(prompt.ids)
        assert prompt.draft.how == "continued"


def test_same_messages_again_are_the_same_prompt() -> None:
    """A repeated request stores nothing of its prompt."""
    session = Session("chatml")
    for text in ("a", "b", "a"):
        session.turn([user("One?")], text)
    assert session.how == ["first", "repeated", "repeated"]
    assert [turn.prompt_ids for turn in session.turns[1:]] == [b"", b""]
    session.check_record()


def test_call_ids_tell_equal_answers_apart() -> None:
    """Two samples that made the same call are told apart by the ids given to their calls."""
    session = Session("chatml", tools=TOOLS)
    call = '<tool_call>\n{"name": "look", "arguments": {"at": 1}}\n</tool_call>'
    first = session.turn([user("One?")], call)
    session.turn([user("One?")], call, by_character=True)
    prompt = session.prompt([user("One?"), first, result("42")])
    assert prompt.ids.startswith(session.sent[0] + session.sampled[0])


def test_forced_opening_is_prompt_and_not_sampled() -> None:
    """What was put into the model's mouth precedes what it sampled, now and in later prompts."""
    session = Session("chatml", tools=TOOLS)
    opening = session.model.format.opening("look")
    answer = session.turn([user("One?")], '{"at": 1}}\n</tool_call>', opening=opening)
    assert answer.tool_calls[0].arguments == '{"at": 1}'
    assert session.text(session.sent[0]).endswith(opening)
    session.turn([user("One?"), answer, result("42")], "42")
    assert session.how[1] == "continued"
    session.check_record()


def test_refusing_template_is_a_bad_request() -> None:
    """What a template raises comes back as the agent's mistake, with its words."""
    session = Session("llama3", tools=TOOLS)
    calls = (ToolCall(name="a", arguments="{}"), ToolCall(name="b", arguments="{}"))
    with pytest.raises(InvalidArgument, match="single tool-calls"):
        session.prompt([user("One?"), Message(role="assistant", tool_calls=calls), result("1")])


def test_turn_over_ids_stands_in_the_same_tree() -> None:
    """A prompt given as ids shares its prefix with the chat turns, and the other way round."""
    session = Session("chatml")
    session.turn([user("One?")], "Yes.")
    given_ids = session.sent[0] + session.sampled[0] + int32_bytes([5, 6, 7])
    session.record(Prompt(ids=given_ids, draft=Draft(how="given", ids=given_ids)), b"", None)
    assert (session.turns[1].parent_turn, len(session.turns[1].prompt_ids)) == (0, 12)
    session.turn([user("One?")], "No.")
    session.check_record()
    restored = Conversation(model=session.model)
    for turn in session.turns:
        restored.restore(turn)
    assert restored.turns == 3


texts = st.text(
    st.one_of(
        st.sampled_from('ab 1.\n{}"é<>|日'),
        st.characters(blacklist_categories=["Cs"]),
    ),
    max_size=12,
)
arguments = st.dictionaries(texts, st.one_of(st.integers(), texts, st.floats(-2, 2)), max_size=2)


@dataclass(frozen=True)
class Step:
    """One request of an arbitrary agent, and how the model answers it."""

    fork: int
    """Which earlier history to go on from."""
    edit: int
    """Which message of it to rewrite; beyond its end: none."""
    cut: int
    """How many of the oldest messages behind the first to forget."""
    said: str
    answer: str
    thought: str
    call: dict[str, Any] | None
    by_character: bool
    ended: bool
    mangle: bool
    """Whether the agent sends back less than it got, and in its own spelling."""


steps = st.builds(
    Step,
    fork=st.integers(0, 7),
    edit=st.integers(0, 12),
    cut=st.integers(0, 6).map(lambda n: max(0, n - 4)),
    said=texts,
    answer=texts,
    thought=texts,
    call=st.none() | arguments,
    by_character=st.booleans(),
    ended=st.booleans(),
    mangle=st.booleans(),
)


def mangled(message: Message) -> Message:
    """An answer as a careless agent sends it back."""
    calls = tuple(
        ToolCall(
            name=call.name,
            arguments=json.dumps(json.loads(call.arguments), indent=2, sort_keys=True),
            call_id=f"mine-{at}",
        )
        for at, call in enumerate(message.tool_calls)
    )
    return replace(message, content=message.content.strip(), reasoning="", tool_calls=calls)


def history_of(session: Session, histories: list[list[Message]], step: Step) -> list[Message]:
    history = list(histories[step.fork % len(histories)])
    if step.cut and len(history) > step.cut + 1:
        del history[1 : 1 + step.cut]
    if step.edit < len(history):
        history[step.edit] = replace(history[step.edit], content=step.said + "!")
    if step.mangle:
        history = [mangled(m) if m.role == "assistant" else m for m in history]
    calls = history[-1].tool_calls if history else ()
    if calls and session.tools:
        return [*history, *(result(step.said) for _ in calls)]
    return [*history, user(step.said)]


def spoken(session: Session, step: Step) -> str:
    text = step.answer
    if step.call is not None and session.model.format.takes_tools and session.tools:
        call = json.dumps({"name": "look", "arguments": step.call}, ensure_ascii=False)
        text += f"\n<tool_call>\n{call}\n</tool_call>"
    if session.model.reasoning and step.thought.strip():
        text = f"<think>\n{step.thought}\n</think>\n\n{text}"
    return text


@pytest.mark.parametrize("family", sorted(FAMILIES))
@given(plan=st.lists(steps, min_size=1, max_size=8), with_tools=st.booleans())
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_conversation_is_recorded_exactly(
    family: str, plan: list[Step], with_tools: bool
) -> None:
    """However histories are forked, edited, cut and mangled: the record spells what the engine
    was sent and what it sampled, a continued prompt keeps the sampled ids, and a branched one is
    the template's own rendering."""
    session = Session(family, tools=TOOLS if with_tools and family != "llama3" else [])
    histories: list[list[Message]] = [[]]
    for step in plan:
        history = history_of(session, histories, step)
        answer = session.turn(
            history, spoken(session, step), ended=step.ended, by_character=step.by_character
        )
        sent, how = session.sent[-1], session.how[-1]
        if how == "continued":
            assert any(
                sent.startswith(before + sampled)
                for before, sampled in zip(session.sent[:-1], session.sampled[:-1], strict=True)
            )
        if how == "first":
            assert sent == session.model.encode(session.template(history))
        if how == "branched" and not any(earlier.mangle for earlier in plan):
            assert session.text(sent).split() == session.template(history).split()
        histories.append([*history, answer])
    session.check_record()


@pytest.mark.parametrize("family", sorted(FAMILIES))
@given(plan=st.lists(steps, min_size=2, max_size=6), split=st.integers(1, 5))
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_restored_session_goes_on_as_if_nothing_had_happened(
    family: str, plan: list[Step], split: int
) -> None:
    """A conversation read back from its turns makes the prompts that the lost one would make."""
    session = Session(family, tools=TOOLS if family != "llama3" else [])
    histories: list[list[Message]] = [[]]
    for at, step in enumerate(plan):
        if at == split:
            turns = [common_pb2.Turn.FromString(t.SerializeToString()) for t in session.turns]
            restored = Conversation(model=session.model)
            for turn in turns:
                restored.restore(turn)
            lost, session.conversation = session.conversation, restored
            history = history_of(session, histories, step)
            assert session.prompt(history).ids == _prompt(lost, session, history)
        history = history_of(session, histories, step)
        answer = session.turn(history, spoken(session, step), by_character=step.by_character)
        histories.append([*history, answer])
    session.check_record()


def _prompt(conversation: Conversation, session: Session, history: list[Message]) -> bytes:
    draft = conversation.draft(history, session.tools)
    return draft.ids + session.model.encode(draft.text)


canonical_text = st.text(st.sampled_from("abc 12.é"), min_size=1, max_size=12).map(
    lambda text: text.strip() or "a"
)


@pytest.mark.parametrize("family", LINEAR)
@given(said=st.lists(st.tuples(canonical_text, canonical_text), min_size=2, max_size=5))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_prompt_is_the_templates_own_rendering(family: str, said: list[tuple[str, str]]) -> None:
    """Where a template never rewrites history, a continued prompt spells what it renders."""
    session = Session(family)
    history: list[Message] = []
    for question, text in said:
        history = [*history, user(question)]
        answer = session.turn(history, text, by_character=True)
        assert session.text(session.sent[-1]) == session.template(history)
        history = [*history, answer]
    assert set(session.how[1:]) == {"continued"}
