"""Losses over the trained tokens of merged trees.

`objectives` has the formulas, `correction` the off-policy correction, `reference` the KL penalty,
`objective` combines them, `stats` has statistics. A custom loss takes `TrainedTokens`.
"""

from forge.rl.losses.tokens import LossFunction, TrainedTokens

__all__ = ["LossFunction", "TrainedTokens"]
