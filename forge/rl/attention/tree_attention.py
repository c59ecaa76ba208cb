"""Attention over a prefix tree, exact, for any transformers model.

Owns the attention function that replaces a model's own during training on prefix trees, and its
backward. `forge.core.prefix_tree` plans the tree; `forge.rl.attention.schedule` divides its
attention into kernel calls.

A token attends its ancestors and itself. In depth-first order this needs two kinds of dense
kernel calls and no gather: each block of the layout attends itself, and all descendants of a node
attend the node in full,

    slab (s, e, t):   Q[e:t)  x  K[s:e), V[s:e)     every query below sees the whole node

Partial results over disjoint keys are merged by their log-sum-exp, as in ring attention. The
backward of each call uses the merged output and log-sum-exp, so its probabilities are the final
ones and partial gradients add up. In a sliding-window layer the few ancestors of a block inside the
window are gathered, for one call per block.

A sink, as of gpt-oss, is one more key of each head, with a learned score and a value of zero. It is
added to the log-sum-exp of the merged result, so no call knows of it.

Shapes: B is always 1 (one tree), H query heads, K key/value heads, L tokens of the pass, M tokens
of its layout (more than L by the prefix), D head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad
from transformers import AttentionInterface

from forge.core.errors import InvalidArgument
from forge.rl import numerics
from forge.rl.attention.flex import flex_runs, flex_tree_attention
from forge.rl.attention.forks import Forks, State
from forge.rl.attention.kernels import Form, Kernel, Shape, kernel_for
from forge.rl.attention.schedule import AttentionSchedule, KernelCall

TREE_ATTENTION = "forge_tree"
"""Name of the attention implementation, for `model.set_attn_implementation`."""


class Prefix(Protocol):
    """Source of the keys and values of a pass's prefix, and of the states after its tokens."""

    @property
    def states(self) -> PrefixStates | None:
        """States of recurrent layers; None for a model without such layers."""
        ...

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [1, K, M, D] with those of the prefix first, differentiable."""
        ...


class PrefixStates(Protocol):
    """States of recurrent layers that a pass gets from others, and those that others get."""

    @property
    def wanted(self) -> frozenset[int]:
        """Own tokens of the pass, in its layout with the prefix, whose states others begin with."""
        ...

    def enter(self, layer: int, hidden_LC: Tensor) -> Tensor:
        """Begin a layer; returns its input. All states before it are known afterwards."""
        ...

    def before(self, layer: int, token: int) -> State:
        """The state after a token of the prefix, differentiable."""
        ...

    def keep(self, layer: int, output_LC: Tensor, states: Mapping[int, State]) -> Tensor:
        """Keep the states after tokens for other passes; returns the output, whose backward takes
        their gradients."""
        ...


@dataclass(slots=True, kw_only=True, eq=False)
class TreeInput:
    """The tree of a pass, for attention and recurrent layers; the keyword `tree` of the model's
    forward. Not frozen: torch.compile would guard the contents of a frozen one, and compile a layer
    again for each tree."""

    schedule: AttentionSchedule
    prefix: Prefix | None = None
    forks: Forks | None = None
    """For models with recurrent layers."""
    states: PrefixStates | None = None


_CURRENT: ContextVar[TreeInput | None] = ContextVar("tree", default=None)


@contextmanager
def over_tree(tree: TreeInput | None) -> Iterator[None]:
    """Context of a forward pass over a tree, for layers that get no keywords of the model's
    forward; without effect for None."""
    token = _CURRENT.set(tree)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def current_tree() -> TreeInput | None:
    """The tree of the pass that computes now, if it is one over a tree."""
    return _CURRENT.get()


class _TreeAttention(torch.autograd.Function):
    """softmax(Q K^T * scale) V with the ancestry of a tree as the mask."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks_H: Tensor | None,
        calls: tuple[KernelCall, ...],
        form: Form,
    ) -> Tensor:
        narrow, wide = (q, k, v), numerics.attention_type(v)
        q, k, v = (one.to(wide) for one in narrow)
        kernel = kernel_for(q.device, softcap=form.softcap)
        _, heads, tokens, size = q.shape
        # [B, L, H, D] in memory: the layout of the kernel's output and the projection's input.
        out = q.new_empty((1, tokens, heads, size)).transpose(1, 2)
        lse = q.new_empty((1, tokens, heads)).transpose(1, 2)
        for call in calls:
            rows, shape = call.queries, _shape(call, q, form)
            part, part_lse = kernel.forward(
                q[:, :, rows], _take(k, call.keys), _take(v, call.keys), shape
            )
            if call.merges:
                _merge(out[:, :, rows], lse[:, :, rows], part, part_lse)
            else:
                out[:, :, rows], lse[:, :, rows] = part, part_lse
        if sinks_H is not None:
            out.mul_(torch.sigmoid(lse - sinks_H[:, None]).unsqueeze(-1))
            torch.logaddexp(lse, sinks_H[:, None], out=lse)
        result = out.to(narrow[0].dtype)
        # Only the forward must round as an engine does.
        kind = torch.promote_types(result.dtype, torch.float32)
        kept = (None if one is None else one.to(kind) for one in (sinks_H, out, lse))
        ctx.save_for_backward(*narrow, *kept)
        ctx.calls, ctx.form, ctx.kernel = calls, form, kernel
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *narrow, sinks_H, out, lse = ctx.saved_tensors
        grad, q, k, v = (one.to(out.dtype) for one in (grad, *narrow))
        kernel: Kernel = ctx.kernel
        dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
        for call in ctx.calls:
            rows, shape = call.queries, _shape(call, q, ctx.form)
            part_q, part_k, part_v = kernel.backward(
                grad[:, :, rows], q[:, :, rows], _take(k, call.keys), _take(v, call.keys),
                out[:, :, rows], lse[:, :, rows], shape,
            )  # fmt: skip
            dq[:, :, rows] += part_q
            _add(dk, call.keys, part_k)
            _add(dv, call.keys, part_v)
        dsinks_H = None
        if sinks_H is not None:
            # Its value is zero, so its share of the gradient is what the output takes away.
            probs = (sinks_H[:, None] - lse).exp_()
            dsinks_H = -(probs * (grad * out).sum(-1)).sum((0, 2))
        dq, dk, dv = (one.to(as_.dtype) for one, as_ in zip((dq, dk, dv), narrow, strict=True))
        return dq, dk, dv, dsinks_H, None, None


def _shape(call: KernelCall, q: Tensor, form: Form) -> Shape:
    mask = None if call.sight is None else call.sight.mask(q)
    return Shape(causal=call.causal, mask=mask, scale=form.scale, softcap=form.softcap)


def _take(x: Tensor, keys: slice | Tensor) -> Tensor:
    return x[:, :, keys] if isinstance(keys, slice) else x.index_select(2, keys.to(x.device))


def _add(total: Tensor, keys: slice | Tensor, part: Tensor) -> None:
    if isinstance(keys, slice):
        total[:, :, keys] += part
    else:
        total.index_add_(2, keys.to(total.device), part)


def _merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge the attention over further keys into `out` and `lse`, in place."""
    out.lerp_(part, torch.sigmoid(part_lse - lse).unsqueeze(-1))
    torch.logaddexp(lse, part_lse, out=lse)


def tree_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    schedule: AttentionSchedule,
    form: Form,
    *,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Attention output [1, H, L, E] for q [1, H, L, D], k [1, K, M, D] and v [1, K, M, E],
    differentiable.

    `sinks_H` are the scores of the heads' sinks. Computed by FlexAttention where it runs, else in
    dense calls in the type that `forge.rl.numerics` says, and returned in v's type. Raises
    `InvalidArgument` for unsupported inputs.
    """
    if q.shape[0] != 1 or k.shape[:3] != v.shape[:3] or k.shape[-1] != q.shape[-1]:
        raise InvalidArgument(
            "tree attention takes one tree, queries as wide as keys, and a value for each key; "
            f"got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        )
    if q.shape[2] != schedule.tokens - schedule.prefix or k.shape[2] != schedule.tokens:
        raise InvalidArgument(
            f"{q.shape[2]} queries and {k.shape[2]} keys for a tree of {schedule.tokens} tokens "
            f"with a prefix of {schedule.prefix}"
        )
    size = v.shape[-1]
    q, k, v = _equally_wide(q, k, v)
    if flex_runs(q):
        return flex_tree_attention(q, k, v, schedule, form, sinks_H=sinks_H)[..., :size]
    # As in an engine, whose keys and values are kept in this type.
    narrow = numerics.matrix_type(v)
    q, k, v = (one.to(narrow) for one in (q, k, v))
    sinks_H = None if sinks_H is None else sinks_H.to(numerics.attention_type(v))
    result: Tensor = _TreeAttention.apply(  # type: ignore[no-untyped-call]
        q, k, v, sinks_H, schedule.calls(form.window), form
    )
    return result[..., :size]


def _equally_wide(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """With zeros behind the narrower heads, which change no score and no value: kernels take one
    size. Those of DeepSeek's values are two thirds of its keys'."""
    short = k.shape[-1] - v.shape[-1]
    if short > 0:
        return q, k, pad(v, (0, short))
    if short < 0:
        return pad(q, (0, -short)), pad(k, (0, -short)), v
    return q, k, v


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _attention_forward(  # noqa: PLR0913
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    tree: TreeInput | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The signature transformers calls; `tree` arrives as a keyword of the model's forward. Outside
    of the graph of a compiled layer, whose code is then the same for every tree."""
    if tree is None:
        raise InvalidArgument(f"{TREE_ATTENTION} needs the forward keyword `tree`")
    if attention_mask is not None or dropout:
        raise InvalidArgument(f"{TREE_ATTENTION} takes no attention mask and no dropout")
    if kwargs.get("position_bias") is not None:
        raise InvalidArgument(f"{TREE_ATTENTION} does not support `position_bias`")
    if tree.prefix is not None:
        layer: int = module.layer_idx  # type: ignore[assignment]
        key, value = tree.prefix.extend(layer, key, value)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    form = Form(scale=scale, window=sliding_window, softcap=softcap or 0.0)
    out = tree_attention(query, key, value, tree.schedule, form, sinks_H=s_aux)
    return out.transpose(1, 2), None


def register() -> None:
    """Make `model.set_attn_implementation(TREE_ATTENTION)` work. Idempotent. The schedule is the
    mask: transformers prepares none for an attention without a mask of its own."""
    AttentionInterface.register(TREE_ATTENTION, _attention_forward)
