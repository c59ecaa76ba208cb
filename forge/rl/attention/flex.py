"""Tree attention as one FlexAttention call, for devices that have its kernel.

Owns the translation of a schedule into a block mask: which blocks of 128 tokens are attended, fully
or under the mask. In depth-first order a key is visible to the contiguous range from itself to the
end of its subtree, so blocks are compared by their bounds alone, without a mask of all pairs.

Shapes: Q query blocks, K key blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from forge.rl.attention.kernels import Form
from forge.rl.attention.schedule import AttentionSchedule

BLOCK_TOKENS = 128
_FAR = 1 << 30
"""A window larger than any position, without effect."""
_VARIANTS = 64
"""Most compilations of the kernel: one per combination of type, heads, with or without a backward,
one block or several. Beyond torch's default limit of 8 it falls back to an unfused computation with
a table of all pairs."""
_OPTIONS: dict[str, Any] = {"BACKEND": "TRITON"}
"""Force the block kernel: the kernel for short queries, which torch prefers below 128 tokens, fails
for grouped heads with more than 128 queries together."""
_SMALL_BLOCKS = {"fwd_BLOCK_M": 16, "fwd_BLOCK_N": 16, "fwd_num_stages": 1}
"""Block sizes of the forward in fp32 and for heads above 256, as torch uses in the backward. On an
H200 torch's own sizes exceed the shared memory (fp32 heads of 160 or 192, bf16 heads of 512) or
spill kilobytes of registers (other fp32 heads from 64 on)."""


def flex_runs(q: Tensor) -> bool:
    """Whether FlexAttention has a forward and a backward for tensors like this one."""
    return q.device.type == "cuda" and q.dtype != torch.float64 and q.shape[-1] >= 16


def flex_tree_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    schedule: AttentionSchedule,
    form: Form,
    *,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Like `tree_attention`, for heads of one size, in the type of v: under autocast, norms return
    queries and keys in fp32, for which there are no tensor cores."""
    window = form.window
    size = _FAR if window is None or window >= schedule.depth else window
    key = (size, q.device)
    if key not in schedule.block_masks:
        schedule.block_masks[key] = tree_block_mask(schedule, window=size, device=q.device)
    # The cap and the scale are constants of the kernel: with a symbol for its cap, torch's backward
    # of a capped score cannot be traced.
    with torch._dynamo.config.patch(recompile_limit=_VARIANTS, specialize_float=True):
        made = _kernel(q.device)(
            q.to(v.dtype),
            k.to(v.dtype),
            v,
            score_mod=_cap(form.softcap) if form.softcap else None,
            block_mask=schedule.block_masks[key],
            scale=form.scale,
            enable_gqa=q.shape[1] != k.shape[1],
            kernel_options=_options(v),
            return_aux=None if sinks_H is None else AuxRequest(lse=True),
        )
    if sinks_H is None:
        return cast(Tensor, made)
    out, more = made
    kept = torch.sigmoid(more.lse - sinks_H.to(more.lse.dtype)[:, None])
    return cast(Tensor, out * kept.unsqueeze(-1).to(out.dtype))


@cache
def _cap(softcap: float) -> Callable[..., Tensor]:
    """One function per cap: another function is another compilation."""

    def capped(score: Tensor, *_places: Tensor) -> Tensor:
        return torch.tanh(score / softcap) * softcap

    return capped


def tree_block_mask(
    schedule: AttentionSchedule, *, window: int, device: torch.device | str
) -> BlockMask:
    """The visible blocks, which of them are fully visible, and the mask of the others."""
    prefix, tokens = schedule.prefix, schedule.tokens
    ends, places = schedule.ends_K, schedule.positions_K
    key_starts, key_stops = _bounds(tokens)
    query_starts, query_stops = (bounds + prefix for bounds in _bounds(tokens - prefix))
    # A key block is visible from its first token to the end of its longest subtree, and to a whole
    # query block that lies after it and before the end of its shortest subtree.
    first_end, last_end = _extremes(ends)
    low, high = _extremes(places)
    query_low, query_high = _extremes(places[prefix:])
    seen = (query_starts[:, None] < last_end) & (query_stops[:, None] > key_starts)
    seen &= query_low[:, None] - high < window
    full = (query_starts[:, None] >= key_stops - 1) & (query_stops[:, None] <= first_end)
    full &= query_high[:, None] - low < window
    # Incomplete blocks stay under the mask: only there the kernel checks bounds.
    full &= (key_stops - key_starts == BLOCK_TOKENS) & (
        query_stops - query_starts == BLOCK_TOKENS
    ).unsqueeze(1)
    ends_on, places_on = ends.to(device), places.to(device)

    def visible(_b: Tensor, _h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        place = query + prefix
        near = places_on[place] - places_on[key] < window
        return (key <= place) & (place < ends_on[key]) & near

    counts, indices = _ordered(seen & ~full, device)
    full_counts, full_indices = _ordered(full & seen, device)
    return BlockMask.from_kv_blocks(
        counts,
        indices,
        full_counts,
        full_indices,
        BLOCK_SIZE=BLOCK_TOKENS,
        mask_mod=visible,
        seq_lengths=(tokens - prefix, tokens),
    )


def _options(v: Tensor) -> dict[str, Any]:
    small = v.dtype == torch.float32 or v.shape[-1] > 256
    return _OPTIONS | _SMALL_BLOCKS if small else _OPTIONS


def _kernel(device: torch.device) -> Any:
    return _compiled() if device.type == "cuda" else flex_attention


@cache
def _compiled() -> Any:
    return torch.compile(flex_attention, dynamic=True)


def _bounds(tokens: int) -> tuple[Tensor, Tensor]:
    starts = torch.arange(0, tokens, BLOCK_TOKENS)
    return starts, (starts + BLOCK_TOKENS).clamp(max=tokens)


def _extremes(values: Tensor) -> tuple[Tensor, Tensor]:
    """Smallest and largest value of each block."""
    short = -len(values) % BLOCK_TOKENS
    blocks = torch.cat([values, values[-1:].expand(short)]).view(-1, BLOCK_TOKENS)
    return blocks.amin(1), blocks.amax(1)


def _ordered(blocks_QK: Tensor, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Number of key blocks of each query block, and all block indices with these first."""
    counts = blocks_QK.sum(1, dtype=torch.int32)
    indices = blocks_QK.to(torch.int8).argsort(dim=1, descending=True, stable=True)
    return counts[None, None].to(device), indices.to(torch.int32)[None, None].to(device)
