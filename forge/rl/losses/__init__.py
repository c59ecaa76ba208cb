"""Losses over the trained tokens of merged trees.

`objectives` has the formulas, `correction` the off-policy correction, `reference` the KL penalty,
`objective` combines them, `stats` has statistics. A custom loss takes `tokens.TrainedTokens`.
"""

from forge.rl.config import DEFAULT_RATIO_CAP, ObjectiveConfig
from forge.rl.losses.objective import BatchSize, Objective
from forge.rl.losses.objectives import cispo_loss
from forge.rl.losses.stats import DomainStats, PolicyStats, TokenStats, domain_stats, policy_stats
from forge.rl.losses.tokens import LossFunction, TrainedTokens

__all__ = [
    "DEFAULT_RATIO_CAP",
    "BatchSize",
    "DomainStats",
    "LossFunction",
    "Objective",
    "ObjectiveConfig",
    "PolicyStats",
    "TokenStats",
    "TrainedTokens",
    "cispo_loss",
    "domain_stats",
    "policy_stats",
]
