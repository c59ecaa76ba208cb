"""The tiny policy: its architecture, and starting weights with induction heads.

Owns the configuration and the structured initialization. From random weights a transformer of this
size needs thousands of steps before it can copy from its context, which agents do all the time.
The circuit for copying is known (Olsson et al., "In-context Learning and Induction Heads", 2022)
and is written into the weights here: heads of the first layer carry each token's code to the next
position; heads of the later layers find positions whose predecessor matches the current token and
copy the token there. All weights are trained; none is frozen.

Layout of the residual stream:  [ one constant | own code | code of the token before | free ].
"""

from __future__ import annotations

import math
from typing import Any, Final

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

HIDDEN: Final = 128
LAYERS: Final = 3
HEADS: Final = 4
HEAD_SIZE: Final = 32
CONTEXT_TOKENS: Final = 512
ROPE_THETA: Final = 1e6

_CODE: Final = HIDDEN // 2 - 1
"""Size of a token's code."""
_OWN: Final = slice(1, 1 + _CODE)
_BEFORE: Final = slice(1 + _CODE, 1 + 2 * _CODE)
_CONSTANT: Final = 0.5
_NOISE: Final = 0.01
_COPY_GAIN: Final = 0.7
_LOOK_BACK_SHARPNESS: Final = 8.0
_MATCH_SHARPNESS: Final = 3.0
_FAST: Final = 0.1
"""Rotary frequencies above this distinguish neighbors, in radians per token."""
_SLOW: Final = 0.02
"""Rotary frequencies below this hardly change over a conversation."""


def new_policy(tokenizer: PreTrainedTokenizerFast, *, seed: int) -> Qwen3ForCausalLM:
    """A policy for the tokenizer's vocabulary with structured starting weights."""
    policy = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=HIDDEN,
            intermediate_size=2 * HIDDEN,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=HEADS,
            head_dim=HEAD_SIZE,
            max_position_embeddings=CONTEXT_TOKENS,
            rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
            tie_word_embeddings=True,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    _write_circuit(policy, torch.Generator().manual_seed(seed))
    return policy


@torch.no_grad()
def _write_circuit(policy: Qwen3ForCausalLM, generator: torch.Generator) -> None:
    for parameter in policy.parameters():
        if parameter.ndim == 2:
            parameter.normal_(0.0, _NOISE, generator=generator)
    codes_VC = torch.randn(policy.config.vocab_size, _CODE, generator=generator)
    embeddings = policy.model.embed_tokens.weight
    embeddings.zero_()
    embeddings[:, 0] = _CONSTANT
    embeddings[:, _OWN] = codes_VC / codes_VC.norm(dim=1, keepdim=True)
    # Rows of one orthonormal basis: each head reads its own part of a code.
    basis_CC = torch.linalg.qr(torch.randn(_CODE, _CODE, generator=generator))[0].T
    first, *later = policy.model.layers
    _look_back(first.self_attn, basis_CC)
    for layer in later:
        _match_and_copy(layer.self_attn, basis_CC)


def _look_back(attention: Any, basis_CC: Tensor) -> None:
    """Every head attends to the position before and copies a part of its code."""
    query, key, value, output = _by_head(attention)
    _sharpen(attention, _LOOK_BACK_SHARPNESS)
    half = HEAD_SIZE // 2
    for head in range(HEADS):
        query[head] = key[head] = value[head] = 0
        for pair, frequency in enumerate(_frequencies()):
            if frequency > _FAST:
                # A query rotated back by one token matches the key of the token before.
                key[head, pair, 0] = 1
                query[head, pair, 0] = math.cos(frequency)
                query[head, pair + half, 0] = -math.sin(frequency)
        part = _part(basis_CC, head, HEAD_SIZE)
        value[head, : len(part), _OWN] = part
        output[:, head] = 0
        output[_BEFORE, head, : len(part)] = part.T


def _match_and_copy(attention: Any, basis_CC: Tensor) -> None:
    """Every head attends to positions whose predecessor matches this token, and copies them."""
    query, key, value, output = _by_head(attention)
    _sharpen(attention, _MATCH_SHARPNESS)
    half = HEAD_SIZE // 2
    slow = [pair for pair, frequency in enumerate(_frequencies()) if frequency <= _SLOW]
    rows = slow + [pair + half for pair in slow]
    for head in range(HEADS):
        matched = _part(basis_CC, head, len(rows))
        for row, direction in zip(rows, matched, strict=False):
            query[head, row, _OWN] += direction
            key[head, row, _BEFORE] += direction
        part = _part(basis_CC, head, HEAD_SIZE)
        value[head, : len(part), _OWN] += part
        output[_OWN, head, : len(part)] += _COPY_GAIN * part.T


def _by_head(attention: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Views of q, k, v as [head, size, hidden] and of o as [hidden, head, size]."""
    into = [getattr(attention, f"{name}_proj").weight for name in "qkv"]
    query, key, value = (weight.view(HEADS, HEAD_SIZE, HIDDEN) for weight in into)
    return query, key, value, attention.o_proj.weight.view(HIDDEN, HEADS, HEAD_SIZE)


def _sharpen(attention: Any, sharpness: float) -> None:
    """Scale the attention scores; queries and keys are normalized before."""
    attention.q_norm.weight.fill_(math.sqrt(sharpness))
    attention.k_norm.weight.fill_(math.sqrt(sharpness))


def _part(basis_CC: Tensor, head: int, size: int) -> Tensor:
    """The head's rows of the basis; the last head may have fewer."""
    start = head * size % _CODE
    return basis_CC[start : start + size]


def _frequencies() -> list[float]:
    """Rotary frequency of each pair of a head, in radians per token."""
    half = HEAD_SIZE // 2
    return [ROPE_THETA ** (-pair / half) for pair in range(half)]
