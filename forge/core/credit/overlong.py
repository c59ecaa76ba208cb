"""Long answers: the soft penalty on their length, and the answers that a token limit cut off.

Owns DAPO's two rules (arXiv 2503.14476, section 3.4) for turns and for whole trajectories. The
penalty is a part of the reward, so baseline and spread contain it. A masked answer gives no policy
gradient; its reward still counts in the baseline of its group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from forge.core.errors import InvalidArgument

Count = Annotated[int, Meta(ge=0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlongRules:
    """Rules for long answers; by default none."""

    mask: Literal["none", "turn", "trajectory"] = "none"
    """No gradient from a turn that ended at max_tokens or at the context length (turn), or from all
    turns of a trajectory that has such a turn (trajectory)."""
    max_tokens: Count = 0
    """Length with the full penalty, in sampled tokens; 0: no penalty."""
    cache_tokens: Count = 0
    """Range before max_tokens over which the penalty rises from 0; 0: the full penalty above
    max_tokens, none up to it."""
    penalty: Annotated[float, Meta(ge=0)] = 1.0
    """Full penalty, in units of the outcome reward."""
    unit: Literal["turn", "trajectory"] = "turn"
    """Length that the penalty measures: the answer of each turn, or all sampled tokens of a
    trajectory."""

    def check(self) -> None:
        """Raises `InvalidArgument` that names a setting without effect."""
        if self.cache_tokens > self.max_tokens:
            limit = f"at most overlong.max_tokens = {self.max_tokens}"
            raise InvalidArgument(
                f"overlong.cache_tokens = {self.cache_tokens} is not allowed: must be "
                f"{limit if self.max_tokens else '0 without overlong.max_tokens'}"
            )


def overlong_penalty(tokens: int, rules: OverlongRules) -> float:
    """Return the penalty of a length, between -`penalty` and 0 (DAPO, eq. 13).

    0 up to `max_tokens - cache_tokens`, then linear, -`penalty` from `max_tokens` on.
    """
    excess = tokens - (rules.max_tokens - rules.cache_tokens)
    if not rules.max_tokens or excess <= 0:
        return 0.0
    return -rules.penalty * (min(1.0, excess / rules.cache_tokens) if rules.cache_tokens else 1.0)


def overlong_penalties(lengths_T: Sequence[int], rules: OverlongRules) -> list[float]:
    """Return the penalty of each turn from the sampled tokens of the turns; that of a whole
    trajectory belongs to its last turn."""
    if rules.unit == "turn":
        return [overlong_penalty(tokens, rules) for tokens in lengths_T]
    last = [overlong_penalty(sum(lengths_T), rules)] if lengths_T else []
    return [0.0] * (len(lengths_T) - 1) + last


def masked_turns(cut_off_T: Sequence[bool], rules: OverlongRules) -> list[bool]:
    """Return the turns without a policy gradient from the turns that a token limit cut off."""
    match rules.mask:
        case "none":
            return [False] * len(cut_off_T)
        case "turn":
            return list(cut_off_T)
        case "trajectory":
            return [any(cut_off_T)] * len(cut_off_T)
