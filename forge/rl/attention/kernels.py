"""Dense attention calls with their log-sum-exp and backward, the parts of tree attention.

Owns one forward and backward per implementation. `forge.rl.attention.schedule` chooses the calls of
a tree; `forge.rl.attention.tree_attention` merges their results.

Shapes: H query heads, K key/value heads (H is a multiple), N queries, M keys, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

CHUNK_SCORES = 1 << 26
"""Most scores held at once by the portable kernel, over all heads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """Properties of a model's attention besides its tensors."""

    scale: float
    window: int | None = None
    """Tokens that a query sees, itself included; None: all."""
    softcap: float = 0.0
    """Bound of the scores by a tanh; 0: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Parameters of a call besides its tensors."""

    causal: bool
    mask: Tensor | None
    """Additive, [1, 1, N, M]."""
    scale: float
    softcap: float = 0.0
    """Bound of the scores by a tanh; 0: none."""


class CpuFlash:
    """torch's own kernel for CPUs: tiled, fp32 and fp64, grouped heads, no softcap.

    `forward` returns attention [1, H, N, D] of q over k and v and its log-sum-exp [1, H, N]; `out`
    and `lse` of `backward` may be over more keys than its own.
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
        """One kernel call."""
        out, lse = _flash(q, k, v, 0.0, shape.causal, attn_mask=shape.mask, scale=shape.scale)
        return out, lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, shape: Shape
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One kernel call."""
        dq, dk, dv = _flash_backward(
            grad, q, k, v, out, lse, 0.0, shape.causal, attn_mask=shape.mask, scale=shape.scale
        )
        return dq, dk, dv


class Portable:
    """Matrix products alone: any device, any type, a chunk of queries at a time."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
        """In chunks, so that memory is bounded."""
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:3])
        for rows in _rows(q, k):
            scores, _ = _scores(q[:, :, rows], k, shape, rows)
            lse[:, :, rows] = scores.logsumexp(-1).flatten(1, 2)
            probs = (scores - lse[:, :, rows].view(scores.shape[:-1])[..., None]).exp_()
            out[:, :, rows] = (probs @ v.unsqueeze(2)).flatten(1, 2)
        return out, lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, shape: Shape
    ) -> tuple[Tensor, Tensor, Tensor]:
        """In the same chunks, recomputed from the log-sum-exp."""
        dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
        for rows in _rows(q, k):
            scores, slope = _scores(q[:, :, rows], k, shape, rows)
            heads = scores.shape[:-1]
            probs = (scores - lse[:, :, rows].reshape(heads)[..., None]).exp_()
            dout = grad[:, :, rows].reshape(*heads, -1)
            delta = (dout * out[:, :, rows].reshape(*heads, -1)).sum(-1, keepdim=True)
            dv += (probs.transpose(-1, -2) @ dout).sum(2)
            dscores = probs * (dout @ v.unsqueeze(2).transpose(-1, -2) - delta) * shape.scale
            if slope is not None:
                dscores *= slope
            dq[:, :, rows] = (dscores @ k.unsqueeze(2)).flatten(1, 2)
            dk += (dscores.transpose(-1, -2) @ q[:, :, rows].reshape(*heads, -1)).sum(2)
        return dq, dk, dv


Kernel = CpuFlash | Portable


def kernel_for(device: torch.device, *, softcap: float) -> Kernel:
    """The fastest kernel of a device that has such a softcap."""
    return CpuFlash() if device.type == "cpu" and not softcap else Portable()


def _rows(q: Tensor, k: Tensor) -> list[slice]:
    step = max(1, CHUNK_SCORES // (q.shape[1] * k.shape[2]))
    return [slice(start, min(start + step, q.shape[2])) for start in range(0, q.shape[2], step)]


def _scores(q: Tensor, k: Tensor, shape: Shape, rows: slice) -> tuple[Tensor, Tensor | None]:
    """[1, K, H/K, n, M], capped and masked, and the slope of the cap; None without one."""
    grouped = q.reshape(1, k.shape[1], -1, *q.shape[2:])
    scores = (grouped * shape.scale) @ k.unsqueeze(2).transpose(-1, -2)
    slope = None
    if shape.softcap:
        bent = torch.tanh(scores / shape.softcap)
        scores, slope = bent * shape.softcap, 1 - bent.square()
    if shape.mask is not None:
        scores = scores + shape.mask[:, :, None, rows]
    if shape.causal:
        later = torch.arange(k.shape[2], device=q.device) > torch.arange(
            rows.start, rows.stop, device=q.device
        ).unsqueeze(-1)
        scores = scores.masked_fill(later, float("-inf"))
    return scores, slope
