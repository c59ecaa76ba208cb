"""Agents and models that do anything, one random move after another.

Owns the moves: which history an agent goes on from and what it has done to it, and what the model
answers. A move is drawn from a `Random`, so that a seed and a number of moves are the whole story.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import TypeVar

from forge.core.conversation.messages import Message, ToolCall
from forge.core.formats import CallDelta
from tests.support.gateway.conversations import Session, as_sent, result, user

Choice = TypeVar("Choice")
WORDS = [
    "a",
    "é日🙂",
    "",
    " ",
    "\n",
    "x y",
    "<|",
    "</tool_call>",
    "[1, 2]",
    "{}",
    '"',
    "ok.",
    "<think>",
]


@dataclass
class WildAgent:
    """Drives a session. All its histories are valid requests, and none is safe from it."""

    session: Session
    random: Random
    histories: list[list[Message]] = field(default_factory=lambda: [[]])

    def move(self) -> list[Message]:
        """One turn, from whichever history; returns the messages that it was asked with."""
        history = self.next_request()
        opening = self.opening(history)
        asked: Sequence[Message] = as_sent(history) if self.chance(0.5) else history
        answer = self.session.turn(
            asked,
            self.spoken(opening),
            ended=self.chance(0.8),
            by_character=self.chance(0.5),
            opening=opening,
        )
        self.histories.append([*history, answer])
        return history

    def next_request(self) -> list[Message]:
        """An earlier history, edited or not, and what the agent says next."""
        history = list(self.histories[-1] if self.chance(0.6) else self.pick(self.histories))
        kind = self.random.randrange(10)
        if kind == 0 and len(history) > 2:
            del history[1 : self.random.randrange(2, len(history))]
        elif kind == 1 and history:
            at = self.random.randrange(len(history))
            history[at] = replace(history[at], content=self.text())
        elif kind == 2 and len(history) > 2:
            history = [history[0], user(f"Known so far: {self.text()}")]
        elif kind == 3 and history and history[-1].role == "assistant":
            # A retry, or one of several samples: the same request again.
            return history[:-1]
        elif kind == 4:
            history = [Message(role="system", content=self.text()), *history]
        if self.chance(0.5):
            history = [self.careless(message) for message in history]
        return [*history, *self.said_next(history)]

    def said_next(self, history: Sequence[Message]) -> list[Message]:
        calls = history[-1].tool_calls if history else ()
        if calls and self.chance(0.9):
            return [result(self.text(), call.call_id) for call in calls]
        return [user(self.text())]

    def careless(self, message: Message) -> Message:
        """An answer as agents send it back: no reasoning, trimmed, arguments formatted again."""
        if message.role != "assistant":
            return message
        calls = tuple(
            ToolCall(
                name=call.name,
                arguments=json.dumps(json.loads(call.arguments), indent=2, sort_keys=True),
                call_id=call.call_id if self.chance(0.5) else f"mine{at:05}",
            )
            for at, call in enumerate(message.tool_calls)
        )
        reasoning = message.reasoning if self.chance(0.3) else ""
        return replace(
            message, content=message.content.strip(), reasoning=reasoning, tool_calls=calls
        )

    def opening(self, history: Sequence[Message]) -> str:
        """Now and then the agent insists on a call."""
        output = self.session.model.format
        if not output.takes_tools or not self.session.tools or self.chance(0.9):
            return ""
        reasoning = self.session.model.reasoning
        closing = (
            reasoning.closing if reasoning and self.session.model.template.opens_reasoning else ""
        )
        return closing + output.opening("look")

    def spoken(self, opening: str) -> str:
        """What the model says: thoughts, text, calls, and sometimes half of a call."""
        model = self.session.model
        if opening:
            written = model.format.write([self.call()])
            return written.partition(model.format.opening("look"))[2]
        text = self.text()
        if model.format.takes_tools and self.session.tools and self.chance(0.6):
            count = 1 if model.format.name == "llama3_json" else self.random.choice((1, 1, 2))
            written = model.format.write([self.call() for _ in range(count)])
            text = written if self.chance(0.3) else f"{text}\n{written}"
            if self.chance(0.1):
                text = text[: self.random.randrange(len(text))]
        if model.reasoning is not None and self.chance(0.6):
            begun = "" if model.template.opens_reasoning else f"{model.reasoning.open}\n"
            text = f"{begun}{self.text()}{model.reasoning.closing}{text}"
        return text

    def call(self) -> CallDelta:
        arguments = {"at": self.text()} if self.chance(0.8) else {}
        return CallDelta(name="look", arguments=json.dumps(arguments, ensure_ascii=False))

    def text(self) -> str:
        return "".join(self.pick(WORDS) for _ in range(self.random.randrange(4)))

    def pick(self, choices: Sequence[Choice]) -> Choice:
        return self.random.choice(choices)

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability
