"""In vLLM's process on a CPU: a kernel of its rejection sampler that has no effect.

vLLM 0.32 spreads temperature, top_k and top_p of each request over the rows of its drafts by a copy
in whole numbers, which it drops. The rows then have what their memory had before: log-probs are
wrong, or not finite.
"""

from __future__ import annotations

import torch
from vllm.platforms import current_platform
from vllm.triton_utils.dispatcher import register_kernels

_EXPAND = "vllm.v1.sample.rejection_sampler.expand_kernel"


def install() -> None:
    """Replace the kernel, on a CPU."""
    if current_platform.is_cpu():
        register_kernels({_EXPAND: expand})


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
