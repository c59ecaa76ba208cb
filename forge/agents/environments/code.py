"""Code agent: write a Python program, run it, read what it printed, answer.

Owns the tasks, the wording of results and a teacher that sometimes answers without a program,
picks a wrong formula, forgets to print, or names a variable that is not there. The sandbox the
programs run in is `forge.agents.sandbox`.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from statistics import median_low
from typing import Any, Final

from forge.agents.environments.base import Message, Reward, ToolError, Transcript
from forge.agents.environments.payload import required
from forge.agents.environments.teaching import (
    Demonstration,
    Rehearsal,
    a_habit,
    function_tool,
)
from forge.agents.sandbox import SANDBOX
from forge.core.errors import InvalidArgument

HABITS: Final = {
    "program": 0.26,
    "guess": 0.4,
    "wrong_formula": 0.1,
    "no_print": 0.12,
    "typo": 0.12,
}
"""How often the teacher does what."""
OUTPUT_CHARS: Final = 200
"""Longest output shown to the model."""
_TOOLS: Final = (function_tool("run", "Run a Python program.", code="string"),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """Something to compute from a list of numbers."""

    phrase: str
    formula: str
    """Python over the list `v`."""
    value: Callable[[list[int]], int]


QUANTITIES: Final = {
    "sum": Quantity(phrase="sum", formula="sum(v)", value=sum),
    "largest": Quantity(phrase="largest", formula="max(v)", value=max),
    "smallest": Quantity(phrase="smallest", formula="min(v)", value=min),
    "low_median": Quantity(phrase="low median", formula="sorted(v)[1]", value=median_low),
}


class CodeDomain:
    """Quantities too tedious to guess: "Find the low median of [41, 17, 32]."."""

    name = "code"
    scaffold = "blackbox"
    max_turns = 3

    def generate(self, rng: Random) -> dict[str, Any]:
        """A quantity of three or four two-digit numbers."""
        numbers = [rng.randint(10, 49) for _ in range(rng.choice((3, 4)))]
        return {"quantity": rng.choice(list(QUANTITIES)), "numbers": numbers}

    def episode(self, payload: Mapping[str, Any]) -> CodeEpisode:
        """A fresh attempt. Raises `InvalidArgument` naming a bad payload key."""
        return CodeEpisode(payload)

    def demonstrate(
        self, payload: Mapping[str, Any], rng: Random, *, flawless: bool = False
    ) -> Demonstration:
        """One attempt of the imperfect teacher, or of one who knows what pays."""
        episode = self.episode(payload)
        rehearsal = Rehearsal(episode.messages, episode.tools, _run_trusted)
        guess = str(rng.randint(10, 299))
        habit = "program" if flawless else a_habit(HABITS, rng)
        if habit == "guess":
            rehearsal.say(guess)
            return rehearsal.finished()
        formula = episode.quantity.formula
        if habit == "wrong_formula":
            formula = rng.choice([q.formula for q in QUANTITIES.values() if q.formula != formula])
        shown = {"no_print": formula, "typo": f"print({formula.replace('v', 'a')})"}
        last = shown.get(habit, f"print({formula})")
        result = rehearsal.call("run", code=f"v = {episode.numbers}; {last}")
        rehearsal.say(guess if habit in shown else result)
        return rehearsal.finished()


class CodeEpisode:
    """One attempt: a question about numbers, and a sandbox."""

    def __init__(self, payload: Mapping[str, Any]) -> None:
        wanted = required(payload, "quantity", str)
        if wanted not in QUANTITIES:
            allowed = ", ".join(QUANTITIES)
            raise InvalidArgument(f"payload 'quantity' must be one of {allowed}, is {wanted!r}")
        self.quantity = QUANTITIES[wanted]
        self.numbers: list[int] = required(payload, "numbers", list)
        if not self.numbers or not all(isinstance(number, int) for number in self.numbers):
            raise InvalidArgument(f"payload 'numbers' must hold integers, is {self.numbers!r}")

    @property
    def messages(self) -> list[Message]:
        """The question."""
        return [
            {"role": "system", "content": "Use Python."},
            {"role": "user", "content": f"Find the {self.quantity.phrase} of {self.numbers}."},
        ]

    @property
    def tools(self) -> list[dict[str, Any]]:
        """A Python interpreter."""
        return list(_TOOLS)

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Run a program. Raises `ToolError` with its last line of complaint if it failed."""
        if name != "run":
            raise ToolError(f"unknown tool {name}")
        result = await SANDBOX.run(str(arguments.get("code", "")))
        if result.error:
            raise ToolError(result.error[:OUTPUT_CHARS])
        return _shown(result.output)

    def score(self, transcript: Transcript) -> list[Reward]:
        """1 for the right number; programs that failed are bad form."""
        right = transcript.answer.strip() == str(self.quantity.value(self.numbers))
        return [
            Reward(name="exact_answer", kind="outcome", value=float(right)),
            *(
                Reward(name="failed_call", kind="process", value=-1.0, turn_index=turn)
                for turn in transcript.failed_calls
            ),
        ]

    async def close(self) -> None:
        """Nothing to free: the sandbox is shared."""


def _shown(output: str) -> str:
    return output.strip()[:OUTPUT_CHARS] or "no output"


def _run_trusted(name: str, arguments: Mapping[str, Any]) -> str:
    """What the sandbox would answer, thirty times faster: the teacher's own programs only."""
    output = io.StringIO()
    try:
        with contextlib.redirect_stdout(output):
            exec(arguments["code"], {})
    except NameError as error:
        raise ToolError(f"NameError: {error}") from None
    return _shown(output.getvalue())
