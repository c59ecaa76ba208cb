"""Attention over a prefix tree, exact, for any transformers model.

Owns the attention function that replaces a model's own during tree-merged training, and its
backward. What the tree looks like is `forge.core.packing`; how its attention is cut into kernel
calls is `forge.rl.attention_schedule`.

A token attends its ancestors and itself. In depth-first order this needs two kinds of dense
kernel calls and no gather: each block of the layout attends itself, and each node with
descendants is attended in full by all of them,

    slab (s, e, t):   Q[e:t)  x  K[s:e), V[s:e)     every query below sees the whole node

Partial results over disjoint keys merge by their log-sum-exp, as in ring attention. The backward
of each call reuses the merged output and log-sum-exp, which makes its probabilities the final
ones: partial gradients then simply add up.

Shapes: B is always 1 (one tree), H query heads, K key/value heads, L layout tokens, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from transformers import AttentionInterface, AttentionMaskInterface

from forge.core.errors import InvalidArgument
from forge.rl.attention_schedule import AttentionSchedule

TREE_ATTENTION = "forge_tree"
"""Name of the attention implementation, for `model.set_attn_implementation`."""

_attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_attend_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class _TreeAttention(torch.autograd.Function):
    """softmax(Q K^T * scale) V with the ancestry of a tree as the mask."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, q: Tensor, k: Tensor, v: Tensor, schedule: AttentionSchedule, scale: float
    ) -> Tensor:
        _, heads, tokens, size = q.shape
        # [B, L, H, D] in memory: what the kernel writes and what the projection after it reads.
        out = q.new_empty((1, tokens, heads, size)).transpose(1, 2)
        lse = q.new_empty((1, tokens, heads)).transpose(1, 2)
        for block in schedule.blocks:
            span = slice(block.start, block.end)
            out[:, :, span], lse[:, :, span] = _attend(
                q[:, :, span], k[:, :, span], v[:, :, span], 0.0, block.causal,
                attn_mask=schedule.mask(block, q), scale=scale,
            )  # fmt: skip
        for start, end, subtree_end in schedule.slabs:
            keys, queries = slice(start, end), slice(end, subtree_end)
            part, part_lse = _attend(q[:, :, queries], k[:, :, keys], v[:, :, keys], scale=scale)
            _merge(out[:, :, queries], lse[:, :, queries], part, part_lse)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.schedule, ctx.scale = schedule, scale  # type: ignore[attr-defined]
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        schedule, scale = ctx.schedule, ctx.scale
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        for block in schedule.blocks:
            span = slice(block.start, block.end)
            dq[:, :, span], dk[:, :, span], dv[:, :, span] = _attend_backward(
                grad[:, :, span], q[:, :, span], k[:, :, span], v[:, :, span],
                out[:, :, span], lse[:, :, span], 0.0, block.causal,
                attn_mask=schedule.mask(block, q), scale=scale,
            )  # fmt: skip
        for start, end, subtree_end in schedule.slabs:
            keys, queries = slice(start, end), slice(end, subtree_end)
            part_q, part_k, part_v = _attend_backward(
                grad[:, :, queries], q[:, :, queries], k[:, :, keys], v[:, :, keys],
                out[:, :, queries], lse[:, :, queries], 0.0, False, scale=scale,
            )  # fmt: skip
            dq[:, :, queries] += part_q
            dk[:, :, keys] += part_k
            dv[:, :, keys] += part_v
        return dq, dk, dv, None, None


def _merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Take the attention over further keys into `out` and `lse`, in place."""
    out.lerp_(part, torch.sigmoid(part_lse - lse).unsqueeze(-1))
    torch.logaddexp(lse, part_lse, out=lse)


def tree_attention(
    q: Tensor, k: Tensor, v: Tensor, schedule: AttentionSchedule, *, scale: float
) -> Tensor:
    """Attention output [1, H, L, D] for q [1, H, L, D] and k, v [1, K, L, D], differentiable.

    Computed in fp32 or wider, returned in v's type: on a CPU the backward of small bf16 calls is
    six times slower than fp32, and merging wants the precision anyway. Raises `InvalidArgument`
    for what it cannot do.
    """
    if q.shape[0] != 1 or k.shape != v.shape or k.shape[-1] != q.shape[-1]:
        raise InvalidArgument(
            f"tree attention takes one tree and equal head sizes; got q {tuple(q.shape)}, "
            f"k {tuple(k.shape)}, v {tuple(v.shape)}"
        )
    if q.shape[2] != schedule.tokens or k.shape[2] != schedule.tokens:
        raise InvalidArgument(f"{q.shape[2]} tokens for a tree of {schedule.tokens}")
    if q.device.type != "cpu":
        raise InvalidArgument(f"tree attention runs on cpu; got tensors on {q.device}")
    wide = torch.promote_types(v.dtype, torch.float32)
    result: Tensor = _TreeAttention.apply(  # type: ignore[no-untyped-call]
        q.to(wide), k.to(wide), v.to(wide), schedule, scale
    )
    return result.to(v.dtype)


def _attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    tree: AttentionSchedule | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The signature transformers calls; `tree` arrives as a keyword of the model's forward."""
    if tree is None:
        raise InvalidArgument(f"{TREE_ATTENTION} needs the forward keyword `tree`")
    if attention_mask is not None or dropout:
        raise InvalidArgument(f"{TREE_ATTENTION} takes no attention mask and no dropout")
    if sliding_window is not None and sliding_window < tree.depth:
        raise InvalidArgument(
            f"a sliding window of {sliding_window} tokens is shorter than the tree's longest "
            f"sequence, {tree.depth}: {TREE_ATTENTION} attends all ancestors"
        )
    for feature in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(feature) is not None:
            raise InvalidArgument(f"{TREE_ATTENTION} does not do `{feature}`")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return tree_attention(query, key, value, tree, scale=scale).transpose(1, 2), None


def _no_mask(*_: Any, **__: Any) -> None:
    """The schedule is the mask; a tensor of [L, L] is never built."""


def register() -> None:
    """Make `model.set_attn_implementation(TREE_ATTENTION)` work. Idempotent."""
    AttentionInterface.register(TREE_ATTENTION, _attention_forward)
    AttentionMaskInterface.register(TREE_ATTENTION, _no_mask)
