"""Code agent: writes a Python program, runs it, reads its output and answers.

Owns the tasks, the wording of results and a teacher that sometimes answers without a program,
uses a wrong formula, forgets to print, or uses an undefined variable. `forge.agents.sandbox` runs
the programs.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from statistics import median_low
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
from forge.agents.environments.payload import required
from forge.agents.environments.teaching import (
    Rehearsal,
    TaughtDomain,
    a_habit,
    function_tool,
)
from forge.agents.sandbox.program_sandbox import SANDBOX
from forge.core.errors import InvalidArgument

HABITS: Final = {
    "program": 0.26,
    "guess": 0.4,
    "wrong_formula": 0.1,
    "no_print": 0.12,
    "typo": 0.12,
}
"""Probabilities of the teacher's habits."""
OUTPUT_CHARS: Final = 200
"""Maximum length of a result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """A function of a list of numbers."""

    phrase: str
    formula: str
    """A Python expression of the list `v`."""
    value: Callable[[list[int]], int]


QUANTITIES: Final = {
    "sum": Quantity(phrase="sum", formula="sum(v)", value=sum),
    "largest": Quantity(phrase="largest", formula="max(v)", value=max),
    "smallest": Quantity(phrase="smallest", formula="min(v)", value=min),
    "low_median": Quantity(phrase="low median", formula="sorted(v)[1]", value=median_low),
}


class CodeEpisode(PlainEpisode):
    """One attempt: a question about numbers, and a sandbox, which all attempts share."""

    tools = [function_tool("run", "Run a Python program.", code="string")]

    def __init__(self, payload: Mapping[str, Any]) -> None:
        wanted = required(payload, "quantity", str)
        if wanted not in QUANTITIES:
            allowed = ", ".join(QUANTITIES)
            raise InvalidArgument(f"payload 'quantity' must be one of {allowed}, is {wanted!r}")
        self.quantity = QUANTITIES[wanted]
        self.numbers: list[int] = required(payload, "numbers", list)
        if not self.numbers or not all(isinstance(number, int) for number in self.numbers):
            raise InvalidArgument(f"payload 'numbers' must have integers only, is {self.numbers!r}")

    @property
    def messages(self) -> list[Message]:
        """The question."""
        return asked("Use Python.", f"Find the {self.quantity.phrase} of {self.numbers}.")

    def run(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Returns the sandbox's result, thirty times faster; for the teacher's programs only."""
        output = io.StringIO()
        try:
            with contextlib.redirect_stdout(output):
                exec(arguments["code"], {})
        except NameError as error:
            raise ToolError(f"NameError: {error}") from None
        return _shown(output.getvalue())

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Runs a program. Raises `ToolError` with the error of a failed one."""
        if name != "run":
            raise ToolError(f"unknown tool {name}")
        result = await SANDBOX.run(str(arguments.get("code", "")))
        if result.error:
            raise ToolError(result.error[:OUTPUT_CHARS])
        return _shown(result.output)

    def score(self, transcript: Transcript) -> list[Reward]:
        """Returns outcome 1 for the right number; each failed program gets -1 as process."""
        right = transcript.answer.strip() == str(self.quantity.value(self.numbers))
        return outcome_and_failures("exact_answer", float(right), transcript)


class CodeDomain(TaughtDomain[CodeEpisode]):
    """Quantities that are hard to guess: "Find the low median of [41, 17, 32]."."""

    new_episode = CodeEpisode
    name = "code"
    scaffold = "blackbox"
    max_turns = 3

    def generate(self, rng: Random) -> dict[str, Any]:
        """Returns a quantity of three or four two-digit numbers."""
        numbers = [rng.randint(10, 49) for _ in range(rng.choice((3, 4)))]
        return {"quantity": rng.choice(list(QUANTITIES)), "numbers": numbers}

    def teach(
        self, rehearsal: Rehearsal, episode: CodeEpisode, rng: Random, *, flawless: bool
    ) -> None:
        """Records the teacher's actions, with or without its mistakes."""
        guess = str(rng.randint(10, 299))
        habit = "program" if flawless else a_habit(HABITS, rng)
        if habit == "guess":
            rehearsal.say(guess)
            return
        formula = episode.quantity.formula
        if habit == "wrong_formula":
            formula = rng.choice([q.formula for q in QUANTITIES.values() if q.formula != formula])
        shown = {"no_print": formula, "typo": f"print({formula.replace('v', 'a')})"}
        last = shown.get(habit, f"print({formula})")
        result = rehearsal.call("run", code=f"v = {episode.numbers}; {last}")
        rehearsal.say(guess if habit in shown else result)


def _shown(output: str) -> str:
    return output.strip()[:OUTPUT_CHARS] or "no output"
