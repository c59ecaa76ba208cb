"""In vLLM's process on a CPU: kernels of vLLM 0.32 that compute something else, or fail.

Its rejection sampler spreads temperature, top_k and top_p of each request over the rows of its
drafts by a copy in whole numbers, which it drops. The rows then have what their memory had before:
log-probs are wrong, or not finite. And top_k alone fails in a step without a draft, as that of a
prompt is, which ends vLLM's process.

Its rotary embedding takes the distance of two heads for that of two tokens if queries have a
dimension for heads, as those of latent attention (DeepSeek V3) have: it rotates each head of a
token by another position.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.platforms import current_platform
from vllm.triton_utils.dispatcher import register_kernels
from vllm.v1.sample import rejection_sampler

_EXPAND = "vllm.v1.sample.rejection_sampler.expand_kernel"
_CUT = rejection_sampler.apply_top_k_top_p
_ROTARY_KERNEL = RotaryEmbedding.forward_cpu


def install() -> None:
    """Replace the kernels of the rejection sampler, on a CPU."""
    if current_platform.is_cpu():
        register_kernels({_EXPAND: expand})
        rejection_sampler.apply_top_k_top_p = cut


def cut(
    logits_TV: torch.Tensor, top_k_T: torch.Tensor | None, top_p_T: torch.Tensor | None
) -> torch.Tensor:
    """Apply top_k and top_p to the logits of the drafts of a step, perhaps of none."""
    if not len(logits_TV):
        return logits_TV
    found: torch.Tensor = _CUT(logits_TV, top_k_T, top_p_T)
    return found


def mend_rotary_embedding() -> None:
    """Use the kernel of the rotary embedding for queries without a dimension for heads alone. Call
    it before the model is built: layers keep the method."""
    RotaryEmbedding.forward_cpu = _forward_cpu


def _forward_cpu(
    rotary: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
) -> Any:
    """See `RotaryEmbedding.forward_cpu`."""
    has_heads = query.dim() > positions.dim() + 1
    forward = type(rotary).forward_native if has_heads else _ROTARY_KERNEL
    return forward(rotary, positions, query, key)


def expand(
    output_T: torch.Tensor,
    input_R: torch.Tensor,
    ends_R: torch.Tensor,
    replace_from: int,
    replace_to: int,
    MAX_NUM_TOKENS: int = 0,
) -> None:
    """Fill T tokens with the value of their request: request r has those before `ends_R[r]`.
    A value `replace_from` becomes `replace_to`. The names and their order are vLLM's."""
    counts_R = torch.diff(ends_R, prepend=ends_R.new_zeros(1))
    replaced_R = torch.where(input_R == replace_from, torch.full_like(input_R, replace_to), input_R)
    output_T.copy_(replaced_R.repeat_interleave(counts_R.long()))
