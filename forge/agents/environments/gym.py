"""Tasks from reasoning-gym that a small language model can partly solve.

Owns the choice of datasets, their difficulty, and the prompt: three examples as an earlier
conversation, equal for all tasks of a domain, so that all prompts share their prefix. The answer
must be exact. docs/smollm2.md has success rates and the reasons for these datasets. The package is
imported when the first task is generated.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from random import Random
from typing import Any, Final

from forge.agents.environments.base import Message, PlainEpisode, Reward, Transcript
from forge.agents.environments.payload import required
from forge.core.errors import FailedPrecondition

MAX_TOKENS: Final = 8
"""An answer has one to three tokens; longer ones are explanations and wrong."""


class GymDomain:
    """One reasoning-gym dataset at one difficulty."""

    scaffold = "blackbox"
    max_turns = 1

    def __init__(
        self, name: str, *, options: Mapping[str, int], examples: tuple[tuple[str, str], ...]
    ) -> None:
        """`name` is also the dataset's. `examples`: questions and answers of the prompt, which are
        never tasks.
        """
        self.name = name
        self.options = options
        self.examples = examples

    def generate(self, rng: Random) -> dict[str, Any]:
        """Returns a question, its answer, and the limit of tokens."""
        shown = {question for question, _ in self.examples}
        dataset = _dataset(self)
        while True:
            task = dataset[rng.getrandbits(32)]
            if task["question"] not in shown:
                return {
                    "question": task["question"],
                    "answer": task["answer"],
                    "max_tokens": MAX_TOKENS,
                }

    def episode(self, payload: Mapping[str, Any]) -> GymEpisode:
        """Returns a new attempt. Raises `InvalidArgument` with the name of a wrong payload key."""
        return GymEpisode(payload, self.examples)


class GymEpisode(PlainEpisode):
    """One attempt: a question, an answer, no tools."""

    def __init__(self, payload: Mapping[str, Any], examples: tuple[tuple[str, str], ...]) -> None:
        self._question = required(payload, "question", str)
        self._answer = required(payload, "answer", str)
        self._examples = examples

    @property
    def messages(self) -> list[Message]:
        """The examples, then the question."""
        earlier = [
            {"role": role, "content": text}
            for example in self._examples
            for role, text in zip(("user", "assistant"), example, strict=True)
        ]
        return [*earlier, {"role": "user", "content": self._question}]

    def score(self, transcript: Transcript) -> list[Reward]:
        """Returns outcome 1 if the first line is the answer, with or without a full stop."""
        right = stated(transcript.answer) == self._answer
        return [Reward(name="exact_answer", kind="outcome", value=float(right))]


@cache
def _dataset(domain: GymDomain) -> Any:
    """Returns the tasks, by a 32-bit number. Cached: some datasets read a book when created."""
    try:
        from reasoning_gym import create_dataset
    except ModuleNotFoundError:
        raise FailedPrecondition(
            f"domain {domain.name} needs the package reasoning-gym: pip install 'forge-rl[gym]'"
        ) from None

    return create_dataset(domain.name, seed=0, size=1 << 32, **domain.options)


def stated(answer: str) -> str:
    """Returns the first line of an answer, without a full stop at its end."""
    return answer.strip().partition("\n")[0].strip().removesuffix(".")


_SUM = "State the final answer to the following arithmetic problem: {} ="
_PRODUCT = "Solve the following multiplication: {}. Give only the result as your final answer."
_GCD = (
    "Find the Greatest Common Divisor (GCD) of these numbers: {}. "
    "Give only the GCD as your final answer."
)
_LETTERS = 'How many times does the letter "{}" appear in the text: "{}"?'

GYM_DOMAINS: Final = (
    GymDomain(
        "chain_sum",
        options={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
        examples=(
            (_SUM.format("2 + 5"), "7"),
            (_SUM.format("9 - 6"), "3"),
            (_SUM.format("3 - 8"), "-5"),
        ),
    ),
    GymDomain(
        "products",
        options={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
        examples=(
            (_PRODUCT.format("4 * 6"), "24"),
            (_PRODUCT.format("9 * 1"), "9"),
            (_PRODUCT.format("3 * 5"), "15"),
        ),
    ),
    GymDomain(
        "gcd",
        options={"min_numbers": 2, "max_numbers": 2, "min_value": 1, "max_value": 50},
        examples=(
            (_GCD.format("12, 18"), "6"),
            (_GCD.format("35, 9"), "1"),
            (_GCD.format("20, 50"), "10"),
        ),
    ),
    GymDomain(
        "letter_counting",
        options={"min_words": 3, "max_words": 5},
        examples=(
            (_LETTERS.format("e", "free the witness"), "4"),
            (_LETTERS.format("c", "constitution is taxed"), "1"),
            (_LETTERS.format("u", "hundred thousand runs"), "3"),
        ),
    ),
)
