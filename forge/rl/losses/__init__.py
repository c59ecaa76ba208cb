"""Losses over the trained tokens of merged trees.

`objectives` has the formulas, `correction` what is done about tokens another policy sampled,
`reference` the KL penalty, `objective` puts them together, `stats` tells about them. What a custom
loss gets is `tokens.TrainedTokens`.
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
