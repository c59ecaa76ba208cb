"""Turns that were sampled under a grammar, for a loss whose policy knows of none.

Owns the two columns that change. Under a grammar a token was drawn from mu = pi_old / Z on what the
grammar allowed, where Z is the share of pi_old that it allowed. The policy trained has no mask, so
the log-prob to compare with is that of pi_old, log mu + log Z, and the token's advantage weighs Z.
Why that is right: docs/training.md, "Grammars".
"""

from __future__ import annotations

import math

from forge.core.errors import InvalidArgument
from forge.core.trajectory import TOKEN_BYTES, float32_array, float32_bytes
from forge.v1.common_pb2 import SampledTokens


def logprobs_without_mask(sampled: SampledTokens) -> bytes:
    """float32 log-probs in the distribution before the mask. Raises `InvalidArgument` when the
    columns are of unequal length."""
    if not sampled.allowed_logprobs:
        return sampled.logprobs
    if len(sampled.allowed_logprobs) != len(sampled.logprobs):
        raise InvalidArgument(
            f"sampled.allowed_logprobs has {len(sampled.allowed_logprobs)} bytes but "
            f"sampled.logprobs has {len(sampled.logprobs)}: one entry per token is needed"
        )
    masked, allowed = float32_array(sampled.logprobs), float32_array(sampled.allowed_logprobs)
    return float32_bytes(one + share for one, share in zip(masked, allowed, strict=True))


def weighted_advantages(sampled: SampledTokens, advantage: float) -> bytes:
    """float32 advantage of every token: that of the turn times the share the grammar allowed."""
    if not sampled.allowed_logprobs:
        return float32_bytes([advantage]) * (len(sampled.logprobs) // TOKEN_BYTES)
    shares = float32_array(sampled.allowed_logprobs)
    return float32_bytes(advantage * math.exp(min(0.0, share)) for share in shares)
