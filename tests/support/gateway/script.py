"""How a test tells the scripted engine, through any client, what to say; imports nothing."""

from __future__ import annotations

from collections.abc import Sequence


def scripted(task: str, *steps: str, after_fold: Sequence[str] = ()) -> str:
    """A task whose `steps` the model will say, one in each turn; `after_fold`: what it will say
    once the agent has put a summary in place of its history."""
    fold = f" FOLD[[In short: LATER(({';;;'.join(after_fold)}))]]" if after_fold else ""
    return f"{task} STEPS[[{'|||'.join(steps)}]]{fold}"
