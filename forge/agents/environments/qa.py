"""Question answering with a look-up tool for facts.

Owns the tasks, the facts and a teacher that sometimes answers without a look-up, looks up the
asking person instead of the subject, or looks up the wrong fact.
"""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any, Final

from forge.agents.environments.base import (
    Message,
    PlainEpisode,
    Reward,
    ToolError,
    Transcript,
    asked,
    outcome_and_failures,
)
from forge.agents.environments.lexicon import CITIES, COLORS, DRINKS, JOBS, NAMES, PETS
from forge.agents.environments.payload import required
from forge.agents.environments.teaching import (
    Rehearsal,
    TaughtDomain,
    a_habit,
    function_tool,
)

HABITS: Final = {"look_up": 0.3, "guess": 0.3, "wrong_person": 0.2, "wrong_fact": 0.2}
"""Probabilities of the teacher's habits."""
FACTS: Final = {"pet": PETS, "city": CITIES, "job": JOBS, "drink": DRINKS, "color": COLORS}
NOT_FOUND: Final = "not found"


class QaEpisode(PlainEpisode):
    """One attempt: a question, and the look-up tool."""

    tools = [function_tool("find", "A fact about a person.", name="string", fact="string")]

    def __init__(self, payload: Mapping[str, Any]) -> None:
        self.asker = required(payload, "asker", str)
        self.subject = required(payload, "subject", str)
        self.field = required(payload, "field", str)
        self.cards: dict[str, dict[str, str]] = required(payload, "cards", dict)
        self._answer = required(required(self.cards, self.subject, dict), self.field, str)

    @property
    def messages(self) -> list[Message]:
        """The question."""
        return asked("Answer the question.", f"{self.asker} asks: {self.field} of {self.subject}?")

    def run(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Returns a fact. Raises `ToolError` for another tool, and for an unknown fact."""
        if name != "find":
            return super().run(name, arguments)
        card = self.cards.get(str(arguments.get("name", "")), {})
        fact = card.get(str(arguments.get("fact", "")))
        if fact is None:
            raise ToolError(NOT_FOUND)
        return fact

    def score(self, transcript: Transcript) -> list[Reward]:
        """Returns outcome 1 for exactly the right word; each failed call gets -1 as process."""
        right = transcript.answer.strip().strip(".") == self._answer
        return outcome_and_failures("exact_answer", float(right), transcript)


class QaDomain(TaughtDomain[QaEpisode]):
    """Questions about one of two people; each person has a card with facts."""

    new_episode = QaEpisode
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

    def teach(
        self, rehearsal: Rehearsal, episode: QaEpisode, rng: Random, *, flawless: bool
    ) -> None:
        """Records the teacher's actions, with or without its mistakes."""
        habit = "look_up" if flawless else a_habit(HABITS, rng)
        guess = rng.choice(FACTS[episode.field])
        if habit == "guess":
            rehearsal.say(guess)
            return
        person = episode.asker if habit == "wrong_person" else episode.subject
        others = [fact for fact in FACTS if fact != episode.field]
        fact = rng.choice(others) if habit == "wrong_fact" else episode.field
        result = rehearsal.call("find", name=person, fact=fact)
        rehearsal.say(guess if result == NOT_FOUND else result)
