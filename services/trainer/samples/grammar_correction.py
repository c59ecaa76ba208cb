"""Corrects turns sampled in another distribution than the policy's, for a loss in the policy's own.

Owns two columns: log-probs and advantages. A token is drawn from mu: pi_old under a grammar or cut,
or with penalties. The trained policy has none of them, so the behavior log-prob is that of pi_old,
and the token's advantage is multiplied by pi_old / mu, at most 1. Under a mask this is the share Z
of pi_old that it left. Derivation: docs/training.md, "Grammars, cuts and penalties".
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

from forge.core.errors import InvalidArgument
from forge.core.token_columns import TOKEN_BYTES, float32_array, float32_bytes
from forge.v1.common_pb2 import SampledTokens, Turn

Cut = Literal["none", "corrected", "share_missing", "unknown"]
"""Effect of cuts and penalties on a turn: none; recorded with a share (corrected); one whose share
the engine did not report; or unknown, in turns recorded before these settings."""


def cut_of(turn: Turn) -> Cut:
    """The effect of cuts, penalties and logit_bias on the turn's distribution, and of a grammar or
    min_tokens whose share is unknown."""
    shares = turn.sampled.allowed_logprobs
    if len(shares) % TOKEN_BYTES == 0 and not all(map(math.isfinite, float32_array(shares))):
        return "share_missing"
    if not turn.HasField("top_p"):
        return "unknown"
    penalties = turn.presence_penalty or turn.frequency_penalty or turn.repetition_penalty
    reshaped = turn.min_p > 0 or penalties != 0 or turn.logit_bias
    if turn.top_p == 1 and turn.top_k == 0 and not reshaped:
        return "none"
    has_shares = len(shares) == len(turn.sampled.logprobs)
    return "corrected" if has_shares else "share_missing"


def logprobs_without_mask(sampled: SampledTokens) -> bytes:
    """float32 log-probs in the distribution without the mask. Raises `InvalidArgument` for columns
    of unequal length."""
    if not sampled.allowed_logprobs:
        return sampled.logprobs
    if len(sampled.allowed_logprobs) != len(sampled.logprobs):
        raise InvalidArgument(
            f"sampled.allowed_logprobs has {len(sampled.allowed_logprobs)} bytes but "
            f"sampled.logprobs has {len(sampled.logprobs)}: one entry per token is needed"
        )
    masked, allowed = float32_array(sampled.logprobs), float32_array(sampled.allowed_logprobs)
    return float32_bytes(one + share for one, share in zip(masked, allowed, strict=True))


def allowed_shares(sampled: SampledTokens) -> bytes:
    """float32 pi_old / mu of every token, at most 1; empty if there is no mask."""
    return float32_bytes(_shares(sampled))


def weighted_advantages(sampled: SampledTokens, advantage: float) -> bytes:
    """float32 advantage of every token: the turn's advantage times its share."""
    if not sampled.allowed_logprobs:
        return float32_bytes([advantage]) * (len(sampled.logprobs) // TOKEN_BYTES)
    return float32_bytes(advantage * share for share in _shares(sampled))


def _shares(sampled: SampledTokens) -> Iterator[float]:
    logs = float32_array(sampled.allowed_logprobs)
    return (math.exp(min(0.0, log)) for log in logs)
