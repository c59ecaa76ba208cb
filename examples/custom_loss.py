"""A custom loss: SAPO (arXiv 2511.20347), a soft gate in place of PPO's clip.

    python -m services.trainer --objective.algorithm examples.custom_loss:sapo \\
        --objective.loss-options positive=1.0,negative=1.05 --objective.normalization sequence

A loss gets the trained tokens of a pass (`forge.rl.losses.TrainedTokens`) and `loss_options` as
keywords, and returns one value per token. Forge does merging, masks, KL penalty and normalization:
it sums the values over the complete batch, each sample with its own advantages.
"""

import torch

from forge.rl.losses import TrainedTokens


def sapo(tokens: TrainedTokens, *, positive: float = 1.0, negative: float = 1.05) -> torch.Tensor:
    heat = torch.where(tokens.advantages > 0, positive, negative)
    gate = torch.sigmoid(heat * (tokens.ratio - 1)) * 4 / heat
    return -gate * tokens.advantages
