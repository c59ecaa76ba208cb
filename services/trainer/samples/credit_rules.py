"""Rules from rewards to advantages: the part of the settings that samples follow.

Imports no records, so that a start reads its settings before slow packages.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from forge.core.credit.advantages import AdvantageRules
from forge.core.credit.overlong import OverlongRules
from forge.core.credit.rewards import RewardWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class CreditRules:
    """Rules from rewards to advantages."""

    weights: RewardWeights
    tokens_per_s: float = 50.0
    """Nominal rate of sampling in completion times."""
    advantages: AdvantageRules = field(default_factory=AdvantageRules)
    overlong: OverlongRules = field(default_factory=OverlongRules)
    critic: bool = False
    """Samples carry returns, from which a critic computes advantages."""
    train_side_calls: frozenset[str] = frozenset()
    """Domains whose side calls are trained, unless the agent excluded them."""
    vocabulary: int = 0
    """Tokens of the policy's vocabulary, which bounds the ids; 0: unknown."""
    drop_flat_groups: bool = False
    """Leave out groups whose rollouts all have the same outcome and process reward."""
