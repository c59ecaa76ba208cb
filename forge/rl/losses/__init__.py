"""Losses over the trained tokens of merged trees.

`objectives` has the formulas, `algorithms` their names and defaults, `correction` what is done
about tokens another policy sampled, `reference` the KL penalty, `objective` puts them together,
`stats` tells about them. What a custom loss gets is `tokens.TrainedTokens`.
"""

from forge.rl.losses.objective import BatchSize, Objective, ObjectiveConfig
from forge.rl.losses.objectives import DEFAULT_RATIO_CAP, cispo_loss
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
