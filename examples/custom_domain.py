"""A domain of one's own, with a tool, state and rewards.

    forge up --set runner.domains=dice=examples.custom_domain:Dice
    .venv/bin/python -m examples.submit RUN_DIR --domain examples.custom_domain:Dice --train

A domain need not be registered to be trained: with a reward function alone, prompts will do:

    forge agents run --reward-functions=short=examples.custom_domain:brevity
"""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any

from forge.agents.environments.base import Reward, ToolError, Transcript
from forge.agents.rewards import RewardTask

ROLL = {
    "type": "function",
    "function": {
        "name": "roll",
        "description": "Rolls one die.",
        "parameters": {"type": "object", "properties": {}},
    },
}


class Dice:
    """Roll until the sum reaches a goal, then say the sum."""

    name = "dice"
    scaffold = "blackbox"
    max_turns = 8

    def generate(self, rng: Random) -> dict[str, Any]:
        return {"goal": rng.randint(6, 12), "seed": rng.getrandbits(32)}

    def episode(self, payload: Mapping[str, Any]) -> DiceEpisode:
        return DiceEpisode(payload["goal"], Random(payload["seed"]))


class DiceEpisode:
    """One game; the dice fall the same way in every attempt at a task."""

    tools = [ROLL]

    def __init__(self, goal: int, rng: Random) -> None:
        self.messages = [{"role": "user", "content": f"Roll until you have {goal}. Your sum?"}]
        self._goal = goal
        self._rng = rng
        self._sum = 0

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        if name != "roll":
            raise ToolError(f"there is no tool {name}")
        self._sum += self._rng.randint(1, 6)
        return str(self._sum)

    def score(self, transcript: Transcript) -> list[Reward]:
        won = self._sum >= self._goal and transcript.answer.strip() == str(self._sum)
        wasted = [
            Reward(name="failed_call", kind="process", value=-0.5, turn_index=turn)
            for turn in transcript.failed_calls
        ]
        return [Reward(name="won", kind="outcome", value=float(won)), *wasted]

    async def close(self) -> None:
        """Nothing is held."""


def brevity(trajectory: Transcript, task: RewardTask) -> float:
    """A reward function: the fewer words, the better."""
    return 1 / max(1, len(trajectory.answer.split()))
