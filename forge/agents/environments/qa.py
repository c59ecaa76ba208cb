"""Question answering with a look-up tool for facts.

Owns the tasks, the facts and a teacher that sometimes answers without a look-up, looks up the
asking person instead of the subject, or looks up the wrong fact.
"""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any, Final

from forge.agents.environments.base import Message, Reward, ToolError, Transcript
from forge.agents.environments.lexicon import CITIES, COLORS, DRINKS, JOBS, NAMES, PETS
from forge.agents.environments.payload import required
from forge.agents.environments.teaching import (
    Demonstration,
    Rehearsal,
    a_habit,
    function_tool,
)

HABITS: Final = {"look_up": 0.3, "guess": 0.3, "wrong_person": 0.2, "wrong_fact": 0.2}
"""Probabilities of the teacher's habits."""
FACTS: Final = {"pet": PETS, "city": CITIES, "job": JOBS, "drink": DRINKS, "color": COLORS}
NOT_FOUND: Final = "not found"
_TOOLS: Final = (function_tool("find", "A fact about a person.", name="string", fact="string"),)


class QaDomain:
    """Questions about one of two people; each person has a card with facts."""

    name = "qa"
    scaffold = "blackbox"
    max_turns = 3

    def generate(self, rng: Random) -> dict[str, Any]:
        """Returns a question of one person about another; both have a card of three facts."""
        asker, subject = rng.sample(NAMES, 2)
        fields = rng.sample(list(FACTS), 3)
        cards = {
            name: {field: rng.choice(FACTS[field]) for field in fields} for name in (asker, subject)
        }
        return {"asker": asker, "subject": subject, "field": rng.choice(fields), "cards": cards}

    def episode(self, payload: Mapping[str, Any]) -> QaEpisode:
        """Returns a new attempt. Raises `InvalidArgument` with the name of a wrong payload key."""
        return QaEpisode(payload)

    def demonstrate(
        self, payload: Mapping[str, Any], rng: Random, *, flawless: bool = False
    ) -> Demonstration:
        """Returns one attempt of the teacher, with or without its mistakes."""
        episode = self.episode(payload)
        rehearsal = Rehearsal(episode.messages, episode.tools, episode.look_up)
        habit = "look_up" if flawless else a_habit(HABITS, rng)
        guess = rng.choice(FACTS[episode.field])
        if habit == "guess":
            rehearsal.say(guess)
            return rehearsal.finished()
        person = episode.asker if habit == "wrong_person" else episode.subject
        others = [fact for fact in FACTS if fact != episode.field]
        fact = rng.choice(others) if habit == "wrong_fact" else episode.field
        result = rehearsal.call("find", name=person, fact=fact)
        rehearsal.say(guess if result == NOT_FOUND else result)
        return rehearsal.finished()


class QaEpisode:
    """One attempt: a question, and the look-up tool."""

    def __init__(self, payload: Mapping[str, Any]) -> None:
        self.asker = required(payload, "asker", str)
        self.subject = required(payload, "subject", str)
        self.field = required(payload, "field", str)
        self.cards: dict[str, dict[str, str]] = required(payload, "cards", dict)
        self._answer = required(required(self.cards, self.subject, dict), self.field, str)

    @property
    def messages(self) -> list[Message]:
        """The question."""
        question = f"{self.asker} asks: {self.field} of {self.subject}?"
        return [
            {"role": "system", "content": "Answer the question."},
            {"role": "user", "content": question},
        ]

    @property
    def tools(self) -> list[dict[str, Any]]:
        """The look-up tool."""
        return list(_TOOLS)

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Returns a fact. Raises `ToolError` for another tool, and for an unknown fact."""
        return self.look_up(name, arguments)

    def look_up(self, name: str, arguments: Mapping[str, Any]) -> str:
        """As `call`, without await."""
        if name != "find":
            raise ToolError(f"unknown tool {name}")
        card = self.cards.get(str(arguments.get("name", "")), {})
        fact = card.get(str(arguments.get("fact", "")))
        if fact is None:
            raise ToolError(NOT_FOUND)
        return fact

    def score(self, transcript: Transcript) -> list[Reward]:
        """Returns outcome 1 for exactly the right word; each failed call gets -1 as process."""
        right = transcript.answer.strip().strip(".") == self._answer
        return [
            Reward(name="exact_answer", kind="outcome", value=float(right)),
            *(
                Reward(name="failed_call", kind="process", value=-1.0, turn_index=turn)
                for turn in transcript.failed_calls
            ),
        ]

    async def close(self) -> None:
        """Nothing to free."""
