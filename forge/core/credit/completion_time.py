"""Completion time of a rollout: its critical path, net of queueing and engine contention.

Owns the formula and the measured baseline of a domain. A turn costs its sampled tokens at a nominal
rate, whatever the engine took; between turns counts the time of the agent and its tools. Turns that
overlap count once, so parallel work is shorter. No measure of one rollout can tell on which of the
earlier answers a request depends; it can depend only on those that had ended. So a turn begins, in
net time, where the longest path over these ends, plus the agent's time since the latest of them:

    start_i = max(end_j for turns j that had ended before i began) + agent_i
    end_i   = start_i + tokens_i / rate
    completion = max(end_i) + agent time after the last turn

Without contention, at the nominal rate, this is the time a clock shows. With it, calls that begin
together and are awaited together (parallel tools, sub-agents) give the same value however long the
engine takes for each. Relative completion time: MiniMax Forge, arXiv 2605.26494.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from forge.core.errors import InvalidArgument

BASELINE_STEPS = 50
"""Optimizer steps over which a baseline is measured: it follows the policy."""
BASELINE_ROLLOUTS = 16
"""Rollouts of a domain before it has a baseline: two groups of eight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnTime:
    """What one turn adds to the critical path. Turns are in the order of their ends."""

    sampled_tokens: int
    agent_s: float
    """Agent and tools, from the latest end of an earlier turn to the request."""
    turns_before: int
    """How many turns had ended when the request arrived: the first so many of the rollout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredBatch:
    """Completion times of one domain in one batch."""

    rollouts: int
    median_s: float


def completion_s(
    turns: Sequence[TurnTime], *, closing_agent_s: float, tokens_per_s: float
) -> float:
    """Seconds of the longest path through `turns` and the agent's time behind them; at least 0.

    `tokens_per_s` is the nominal rate of sampling. Raises `InvalidArgument` for times that are
    negative or not finite, and for a turn that follows one which is not before it.
    """
    if not (math.isfinite(tokens_per_s) and tokens_per_s > 0):
        raise InvalidArgument(f"tokens_per_s is {tokens_per_s}; must be finite and > 0")
    longest_s = [0.0]
    """After each number of ended turns."""
    for index, turn in enumerate(turns):
        if not 0 <= turn.turns_before <= index:
            raise InvalidArgument(
                f"turn {index} has turns_before {turn.turns_before}; must be from 0 to {index}"
            )
        start_s = longest_s[turn.turns_before] + _time(turn.agent_s, f"agent_s of turn {index}")
        end_s = start_s + turn.sampled_tokens / tokens_per_s
        longest_s.append(max(longest_s[-1], end_s))
    return longest_s[-1] + _time(closing_agent_s, "closing_agent_s")


def measured_baseline_s(batches: Sequence[MeasuredBatch]) -> float | None:
    """The usual completion time of a domain: the median of its batches' medians.

    `None` until `BASELINE_ROLLOUTS` rollouts are known, and when they took no time at all.
    """
    known = [batch for batch in batches if batch.rollouts]
    if sum(batch.rollouts for batch in known) < BASELINE_ROLLOUTS:
        return None
    return median(batch.median_s for batch in known) or None


def _time(value_s: float, name: str) -> float:
    if not (math.isfinite(value_s) and value_s >= 0):
        raise InvalidArgument(f"{name} is {value_s}; must be finite and >= 0")
    return value_s
