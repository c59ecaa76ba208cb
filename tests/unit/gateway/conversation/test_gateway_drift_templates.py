"""Prompts are the template's own: where the model says what the template would write, any prompt
spells what the template renders, and it continues wherever the template lets it."""

from __future__ import annotations

import json
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge.core.conversation.messages import Message, ToolCall, agree
from tests.support.gateway.chat_templates import FAMILIES
from tests.support.gateway.conversations import TOOLS, Session, as_sent, result, user

WORDS = ["a", "12.", "é日", "x y", "{1}", "ok"]
THINKING = ("qwen3", "minimax", "kimi")
ONLY_CALLS = ("llama3", "mistral", "harmony")
"""Their templates write no content beside a call, or write it as reasoning."""
OWN_IDS = ("kimi", "mistral")
"""Their calls have ids in their notation."""


class Speaker:
    """A model that writes as its template does, and an agent that repeats it carelessly."""

    def __init__(self, family: str, seed: int) -> None:
        self.random = Random(seed)
        self.session = Session(family, tools=self.random.choice((TOOLS, [])))
        self.texts = 0
        self.calls = bool(self.session.tools) and self.session.model.format.takes_tools

    def text(self) -> str:
        """Never the same twice: two equal answers could not be distinguished."""
        self.texts += 1
        return " ".join([f"{self.texts}", *self.random.choices(WORDS, k=self.random.randrange(4))])

    def answer(self) -> Message:
        """What the model means to say."""
        family, random = self.session.family, self.random
        thinks = family == "minimax" or (family in THINKING and random.random() < 0.5)
        calls: tuple[ToolCall, ...] = ()
        if self.calls and random.random() < 0.5:
            call_id = f"functions.look:{random.randrange(100, 1000)}"
            arguments = json.dumps({"at": self.text()}, ensure_ascii=False)
            # As long as Mistral's are, or as Kimi's.
            call_id = call_id if family == "kimi" else call_id[-9:].replace(":", "0")
            calls = (ToolCall(name="look", arguments=arguments, call_id=call_id),)
        silent = calls and (family in ONLY_CALLS or random.random() < 0.5)
        return Message(
            role="assistant",
            content="" if silent else self.text(),
            reasoning=self.text() if thinks else "",
            tool_calls=calls,
        )

    def written(self, history: list[Message], answer: Message) -> str | None:
        """What the template writes for it; None if it is not to be found behind a prompt."""
        render = self.session.model.template.renderer(self.session.tools)
        before, closed = render(history, True), render([*history, answer], False)
        if closed.startswith(before):
            body = closed[len(before) :]
        else:
            # Some drop earlier reasoning because of the answer: then it is the end of it all.
            asked = [user(".")]
            header = render(asked, True).removeprefix(render(asked, False))
            _, found, body = closed.rpartition(header)
            if not found or not header:
                return None
        return body[: max(body.rfind(end) for end in self.session.model.end_texts)]

    def repeated(self, history: list[Message]) -> list[Message]:
        """The history as the agent sends it: without reasoning, or with other spellings."""
        return [self._careless(message) for message in history]

    def _careless(self, message: Message) -> Message:
        if message.role != "assistant" or self.random.random() < 0.5:
            return message
        calls = tuple(
            ToolCall(
                name=call.name,
                arguments=json.dumps(json.loads(call.arguments), indent=1),
                call_id=call.call_id,
            )
            for call in message.tool_calls
        )
        return Message(role="assistant", content=f" {message.content}\n", tool_calls=calls)

    def follow(self, history: list[Message]) -> list[Message]:
        """What the agent says next."""
        calls = history[-1].tool_calls if history else ()
        if calls:
            return [result(self.text(), call.call_id) for call in calls]
        return [user(self.text())]


@pytest.mark.parametrize("family", sorted(FAMILIES))
@given(seed=st.integers(0, 2**32 - 1), turns=st.integers(1, 8))
@settings(max_examples=25, deadline=None)
def test_prompts_are_the_templates_own_rendering(family: str, seed: int, turns: int) -> None:
    """Continued or branched, over tool loops, forks and careless agents: the ids decode to the
    template's rendering of the sampled messages, and the answer is parsed as it was meant."""
    speaker = Speaker(family, seed)
    session, random = speaker.session, speaker.random
    lines: list[tuple[list[Message], int]] = [([], -1)]
    for _ in range(turns):
        known, last = lines[-1] if random.random() < 0.7 else random.choice(lines)
        history = [*known, *speaker.follow(known)]
        asked = [*speaker.repeated(known), *history[len(known) :]]
        meant = speaker.answer()
        text = speaker.written(history, meant)
        if text is None:
            continue
        said = session.turn(
            as_sent(asked) if random.random() < 0.5 else asked,
            text,
            by_character=random.random() < 0.5,
        )
        assert said.key == meant.key
        assert agree(said, meant)
        if family in OWN_IDS:
            assert said.call_ids == meant.call_ids
        assert session.text(session.sent[-1]) == session.template(history)
        if last >= 0:
            sequence = session.sent[last] + session.sampled[last]
            if session.template(history).startswith(session.text(sequence)):
                assert session.sent[-1].startswith(sequence)
        lines.append(([*history, said], len(session.turns) - 1))
    session.check_record()
