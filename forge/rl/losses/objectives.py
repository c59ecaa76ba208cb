"""The objectives: policy-gradient losses, one value per trained token.

Owns the formulas, each with its source. Log-probs come from `forge.rl.model.policy`, advantages
from `forge.core.credit.advantages`; `forge.rl.losses.objective` chooses, corrects and normalizes.
The papers' "sequence" is a sample here, one turn's answer, or with `trajectory` all trained tokens
of a trajectory.

Shapes: T trained tokens, S samples.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forge.rl.losses.tokens import TrainedTokens

MAX_LOG_RATIO = 20.0
"""Largest log-ratio of a sequence, as in the VESPO loss of TRL 1.16."""


def cispo_loss(
    logprobs_T: Tensor, old_T: Tensor, advantages_T: Tensor, *, ratio_cap: float
) -> Tensor:
    """CISPO (MiniMax-M1, arXiv 2506.13585, eq. 4; M2 drops its eps_low), per token.

        -sg(clip(r_t, 0, cap)) * A_t * log pi(o_t),   r_t = pi(o_t) / pi_old(o_t)

    `ratio_cap` is the cap itself: the paper's 1 + eps_high, and TRL's `epsilon_high`. Unlike
    PPO's clip, no token loses its gradient; unlike REINFORCE, none can dominate.
    """
    weights_T = (logprobs_T.detach() - old_T).exp().clamp(max=ratio_cap)
    return -(weights_T * advantages_T * logprobs_T)


def clipped_loss(
    tokens: TrainedTokens, *, clip_low: float, clip_high: float, dual_clip: float
) -> Tensor:
    """PPO's clipped surrogate (arXiv 1707.06347, eq. 7), per token.

        -min(r_t * A_t, clip(r_t, 1 - clip_low, 1 + clip_high) * A_t)

    GRPO, Dr.GRPO, DAPO and REINFORCE++ share it and differ in bounds, baseline and normalization.
    `dual_clip` bounds the unclipped ratio, too (0: no bound), which limits the loss of a negative
    advantage (INTELLECT-2, arXiv 2505.07291; TRL's `delta`).
    """
    ratio_T = tokens.ratio
    bounded_T = ratio_T.clamp(1 - clip_low, 1 + clip_high)
    free_T = ratio_T.clamp(max=dual_clip) if dual_clip else ratio_T
    return -torch.min(free_T * tokens.advantages, bounded_T * tokens.advantages)


def gspo_loss(
    tokens: TrainedTokens, *, clip_low: float, clip_high: float, trajectory: bool = False
) -> Tensor:
    """GSPO (arXiv 2507.18071): the length-normalized ratio of the sequence.

        s_i = (pi(o_i) / pi_old(o_i))^(1/|o_i|),   s_it = sg(s_i) * pi(o_it) / sg(pi(o_it))
        -min(s_it * A_it, clip(s_it, 1 - clip_low, 1 + clip_high) * A_it)

    This is the paper's token form: it equals the sequence form if all advantages of a sequence are
    equal, and is also defined if they are not.
    """
    ratio_T = tokens.spread(sequence_ratio(tokens, trajectory=trajectory))
    ratio_T = ratio_T * (tokens.logprobs - tokens.logprobs.detach()).exp()
    bounded_T = ratio_T.clamp(1 - clip_low, 1 + clip_high)
    return -torch.min(ratio_T * tokens.advantages, bounded_T * tokens.advantages)


def rloo_loss(
    tokens: TrainedTokens, *, clip_low: float, clip_high: float, trajectory: bool = False
) -> Tensor:
    """RLOO (arXiv 2402.14740) with a clipped ratio of whole sequences, as in TRL.

        R_i = pi(o_i) / pi_old(o_i),   -min(R_i * A_i, clip(R_i, 1 - clip_low, 1 + clip_high) * A_i)

    R_i is at most e^20. The loss is spread over the sequence's tokens: its sum over them is the
    sequence's loss, with gradient R_i * sum_t A_it * grad log pi(o_it). The advantages contain the
    leave-one-out baseline.
    """
    ratio_T = tokens.spread(_whole_ratio(tokens, trajectory=trajectory))
    lengths_S = tokens.trajectory_lengths if trajectory else tokens.lengths
    shares_T = tokens.spread(1.0 / lengths_S.to(ratio_T.dtype))
    free_T = ratio_T * (shares_T + tokens.logprobs - tokens.logprobs.detach())
    bounded_T = ratio_T.clamp(1 - clip_low, 1 + clip_high) * shares_T
    # The minimum is per sequence, so it is chosen by value.
    kept_T = torch.where(
        outside(ratio_T, tokens.advantages, clip_low=clip_low, clip_high=clip_high),
        bounded_T,
        free_T,
    )
    return -(kept_T * tokens.advantages)


def reinforce_loss(tokens: TrainedTokens) -> Tensor:
    """REINFORCE (Williams, 1992), per token: -A_t * log pi(o_t), without a ratio."""
    return -(tokens.advantages * tokens.logprobs)


def sequence_ratio(tokens: TrainedTokens, *, trajectory: bool) -> Tensor:
    """[S] GSPO's ratio: geometric mean over the tokens of a sample or its trajectory, without
    gradient."""
    lengths_S = tokens.trajectory_lengths if trajectory else tokens.lengths
    return (tokens.gaps(trajectory=trajectory) / lengths_S).exp()


def outside(ratio_T: Tensor, advantages_T: Tensor, *, clip_low: float, clip_high: float) -> Tensor:
    """[T] whether PPO's clip removes the token's gradient: the ratio is beyond the bound in the
    direction of the advantage."""
    high_T = (ratio_T > 1 + clip_high) & (advantages_T > 0)
    low_T = (ratio_T < 1 - clip_low) & (advantages_T < 0)
    return high_T | low_T


def clipped_tokens(
    tokens: TrainedTokens,
    name: str,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float = 0.0,
    trajectory: bool,
) -> Tensor:
    """[T] whether a bound removes the token's gradient, by the ratio of the named algorithm."""
    if name == "gspo":
        ratio_T = tokens.spread(sequence_ratio(tokens, trajectory=trajectory))
    elif name == "rloo":
        ratio_T = tokens.spread(_whole_ratio(tokens, trajectory=trajectory))
    else:
        ratio_T = tokens.ratio.detach()
    clipped_T = outside(ratio_T, tokens.advantages, clip_low=clip_low, clip_high=clip_high)
    if dual_clip:
        # Of two bounds, the lower one holds for a gain and the upper one for a loss.
        upper = max(dual_clip, 1 + clip_high)
        clipped_T |= (ratio_T > dual_clip) & (tokens.advantages > 0)
        clipped_T |= (ratio_T > upper) & (tokens.advantages < 0)
    return clipped_T


def _whole_ratio(tokens: TrainedTokens, *, trajectory: bool) -> Tensor:
    """[S] RLOO's ratio, at most e^20: a product over many stale tokens would overflow."""
    return tokens.gaps(trajectory=trajectory).clamp(max=MAX_LOG_RATIO).exp()
