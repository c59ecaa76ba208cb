"""Completion time of a rollout: its critical path, net of queueing and engine contention.

Owns the formula and the measured baseline of a domain. A turn costs its sampled tokens at a nominal
rate, independent of the engine's time; between turns counts the time of the agent and its tools.
Overlapping turns count once, so parallel work is shorter. It is unknown on which earlier answers a
request depends, but only ended ones are possible. So a turn begins, in net time, at the end of the
longest path over these, plus the agent's time since the latest of them:

    start_i = max(end_j for turns j that had ended before i began) + agent_i
    end_i   = start_i + tokens_i / rate
    completion = max(end_i) + agent time after the last turn

Without contention, at the nominal rate, this is wall-clock time. With contention, calls that begin
and end together (parallel tools, sub-agents) give the same value, independent of the engine's time
for each. Relative completion time: MiniMax Forge, arXiv 2605.26494.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from forge.core.errors import InvalidArgument

BASELINE_STEPS = 50
"""Optimizer steps of the baseline's measurement, so that it follows the policy."""
BASELINE_ROLLOUTS = 16
"""Rollouts of a domain before it has a baseline: two groups of eight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnTime:
    """One turn's part of the critical path. Turns are in the order of their ends."""

    sampled_tokens: int
    agent_s: float
    """Agent and tools, from the latest end of an earlier turn to the request."""
    turns_before: int
    """Number of turns that had ended when the request arrived."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredBatch:
    """Completion times of one domain in one batch."""

    rollouts: int
    median_s: float


def completion_s(
    turns: Sequence[TurnTime], *, closing_agent_s: float, tokens_per_s: float
) -> float:
    """Return the seconds of the longest path through `turns` and the agent's time after them.

    `tokens_per_s` is the nominal rate of sampling. Raises `InvalidArgument` for negative or
    infinite times, and for a turn that follows a later one.
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
    """Return a domain's usual completion time: the median of its batches' medians.

    None before `BASELINE_ROLLOUTS` rollouts, and for a median of 0.
    """
    known = [batch for batch in batches if batch.rollouts]
    if sum(batch.rollouts for batch in known) < BASELINE_ROLLOUTS:
        return None
    return median(batch.median_s for batch in known) or None


def _time(value_s: float, name: str) -> float:
    if not (math.isfinite(value_s) and value_s >= 0):
        raise InvalidArgument(f"{name} is {value_s}; must be finite and >= 0")
    return value_s
