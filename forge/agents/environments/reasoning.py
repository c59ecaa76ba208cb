"""Reasoning: short word problems, for which a written calculation beats a guess.

Owns the tasks, their answers and a teacher with three habits: it calculates step by step, guesses
at once, or stops half-way. Only the first habit is rewarded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from random import Random
from typing import Any, Final

from forge.agents.environments.base import Message, PlainEpisode, Reward, Transcript, asked
from forge.agents.environments.lexicon import DAYS, FRUIT, NAMES
from forge.agents.environments.payload import required
from forge.agents.environments.teaching import Rehearsal, TaughtDomain, a_habit
from forge.core.errors import InvalidArgument

HABITS: Final = {"work": 0.24, "guess": 0.42, "hurry": 0.34}
"""Probabilities of the teacher's habits."""
_ANSWER: Final = re.compile(r"Answer: (-?\d+)\s*\.?\s*$")


class ReasoningEpisode(PlainEpisode):
    """One attempt: a question, an answer, no tools."""

    def __init__(self, payload: Mapping[str, Any]) -> None:
        self._name = required(payload, "name", str)
        self._goods = required(payload, "goods", str)
        self.start = required(payload, "start", int)
        self.changes: list[int] = required(payload, "changes", list)
        if not all(isinstance(change, int) for change in self.changes):
            raise InvalidArgument(f"payload 'changes' must have integers only, is {self.changes!r}")
        if len(self.changes) > len(DAYS):
            raise InvalidArgument(f"payload 'changes' must have at most {len(DAYS)} items")

    @property
    def messages(self) -> list[Message]:
        """The story and its question."""
        changes = ", ".join(f"{day} {d:+d}" for day, d in zip(DAYS, self.changes, strict=False))
        story = f"{self._name} has {self.start} {self._goods}: {changes}. How many?"
        return asked("Solve the problem.", story)

    def score(self, transcript: Transcript) -> list[Reward]:
        """Returns outcome 1 for the right number; an answer without a number gets -1 as process."""
        number = _ANSWER.search(transcript.answer)
        right = number is not None and int(number[1]) == self.start + sum(self.changes)
        rewards = [Reward(name="exact_answer", kind="outcome", value=float(right))]
        if number is None:
            rewards.append(Reward(name="no_answer", kind="process", value=-1.0))
        return rewards


class ReasoningDomain(TaughtDomain[ReasoningEpisode]):
    """Sums in a story: "Tom has 4 figs: Mon +2, Tue -2, Wed +1. How many?"."""

    new_episode = ReasoningEpisode
    name = "reasoning"
    scaffold = "blackbox"
    max_turns = 1

    def generate(self, rng: Random) -> dict[str, Any]:
        """Returns a story with two or three changes to a number that stays a digit."""
        start = held = rng.randint(1, 9)
        changes: list[int] = []
        for _ in range(rng.choice((2, 3))):
            change = rng.choice([d for d in range(-2, 3) if d and 0 <= held + d <= 9])
            changes.append(change)
            held += change
        return {
            "name": rng.choice(NAMES),
            "goods": rng.choice(FRUIT),
            "start": start,
            "changes": changes,
        }

    def teach(
        self, rehearsal: Rehearsal, episode: ReasoningEpisode, rng: Random, *, flawless: bool
    ) -> None:
        """Records the teacher's actions, with or without its mistakes."""
        habit = "work" if flawless else a_habit(HABITS, rng)
        if habit == "guess":
            rehearsal.say(f"Answer: {rng.randint(0, 9)}")
            return
        changes = episode.changes
        if habit == "hurry":
            changes = changes[: rng.randint(1, len(changes) - 1)]
        rehearsal.say(_working(episode.start, changes))


def _working(start: int, changes: list[int]) -> str:
    held = start
    steps = [str(start)]
    for day, change in zip(DAYS, changes, strict=False):
        held += change
        steps.append(f"{day} {change:+d}={held}")
    return f"{' '.join(steps)}. Answer: {held}"
