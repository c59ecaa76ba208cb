"""The KL penalty against a frozen reference policy.

Owns Schulman's three estimators of KL(pi || pi_ref) from tokens drawn from pi ("Approximating KL
Divergence", 2020), and their uses. With x = log pi - log pi_ref:

    k1 = x                unbiased; its own gradient has mean 0, so it is part of the advantage
    k2 = x^2 / 2          a loss: its gradient is that of KL, token by token
    k3 = e^(-x) - 1 + x   a loss: unbiased, never negative; used by GRPO
"""

from __future__ import annotations

import torch
from torch import Tensor

from forge.rl.config import KlEstimator
from forge.rl.losses.tokens import TrainedTokens


def kl_loss(tokens: TrainedTokens, estimator: KlEstimator) -> Tensor:
    """[T] k2 or k3, differentiable."""
    assert tokens.reference is not None, "a KL penalty needs a reference"
    log_ratio_T = tokens.logprobs - tokens.reference
    if estimator == "k2":
        return log_ratio_T.square() / 2
    return (-log_ratio_T).exp() - 1 + log_ratio_T


def kl_to_go(tokens: TrainedTokens) -> Tensor:
    """[T] k1 summed from each token to the end of its sample, without gradient.

    Subtracted from the advantages it adds the gradient of the sample's KL, as in RLOO (arXiv
    2402.14740) and REINFORCE++ (arXiv 2501.03262).
    """
    assert tokens.reference is not None, "a KL penalty needs a reference"
    return tokens.following(tokens.logprobs.detach() - tokens.reference)


def teacher_gaps(tokens: TrainedTokens) -> Tensor:
    """[T] log pi - log pi_teacher, without gradient: its mean is the k1 estimate of
    KL(pi || pi_teacher), and minus it is the advantage of on-policy distillation."""
    assert tokens.teacher is not None, "distillation needs a teacher"
    return tokens.logprobs.detach() - tokens.teacher


def kl_mean(tokens: TrainedTokens) -> Tensor:
    """[T] k3 of the tokens without gradient, for metrics."""
    with torch.no_grad():
        return kl_loss(tokens, "k3")
