"""A loss of one's own that a single rank cannot compute."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from forge.rl.losses import TrainedTokens


def on_rank_1(tokens: TrainedTokens) -> Tensor:
    """REINFORCE, but on rank 1."""
    if dist.get_rank() == 1:
        raise LookupError("no such loss here")
    return -tokens.advantages * tokens.logprobs
