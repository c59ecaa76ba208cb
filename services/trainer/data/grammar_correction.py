"""Turns that were sampled under a grammar, top_k or top_p, for a loss whose policy knows of none.

Owns the two columns that change. With a mask of any of these kinds a token was drawn from
mu = pi_old / Z on what the mask left, where Z is the share of pi_old that it left. The policy
trained has no mask, so the log-prob to compare with is that of pi_old, log mu + log Z, and the
token's advantage weighs Z. Why that is right: docs/training.md, "Grammars, top_k and top_p".
"""

from __future__ import annotations

import math
from typing import Literal

from forge.core.errors import InvalidArgument
from forge.core.token_columns import TOKEN_BYTES, float32_array, float32_bytes
from forge.v1.common_pb2 import SampledTokens, Turn

Cut = Literal["none", "corrected", "share_missing", "unknown"]
"""Of a turn by top_k or top_p: none; one whose share is on record; one whose share is not, as of
an engine that does not say it; or unknown, as in turns recorded before these settings were."""


def cut_of(turn: Turn) -> Cut:
    """Whether top_k or top_p cut the distribution of the turn, and whether that can be undone."""
    if not turn.HasField("top_p"):
        return "unknown"
    if turn.top_p == 1 and turn.top_k == 0:
        return "none"
    told = len(turn.sampled.allowed_logprobs) == len(turn.sampled.logprobs)
    return "corrected" if told else "share_missing"


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
    """float32 advantage of every token: that of the turn times the share the mask left."""
    if not sampled.allowed_logprobs:
        return float32_bytes([advantage]) * (len(sampled.logprobs) // TOKEN_BYTES)
    shares = float32_array(sampled.allowed_logprobs)
    return float32_bytes(advantage * math.exp(min(0.0, share)) for share in shares)
