"""Log-probabilities from hidden states, without ever holding all logits.

Owns the language-model head of training: fp32 (or wider) logits for the rows asked, a chunk at a
time, with a backward that recomputes them. Which rows are asked is `forge.rl.tree_batch`.

Shapes: R rows, E edges, C hidden channels, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from forge.rl.tree_parts import HeadRows

CHUNK_ELEMENTS = 1 << 26
"""Most logits held at once: 256 MiB in fp32."""


class _EdgeLogprobs(torch.autograd.Function):
    """log softmax(h W^T / temperature)[target] per edge, and the entropy of each row."""

    @staticmethod
    def forward(
        ctx: Any, hidden_RC: Tensor, weight_VC: Tensor, head: HeadRows, chunk_rows: int
    ) -> tuple[Tensor, Tensor]:
        chunks = list(_chunks(head, hidden_RC.shape[0], chunk_rows))
        logprobs_E = hidden_RC.new_empty(head.rows_E.shape)
        entropy_R = hidden_RC.new_empty(hidden_RC.shape[:1])
        probs_RV = hidden_RC.new_empty(0)
        for rows, edges in chunks:
            logits_RV = _logits(hidden_RC, weight_VC, head, rows)
            probs_RV = logits_RV.softmax(-1)
            # log sum exp by the likeliest token, which costs two reads and no table of its own.
            lse_R = logits_RV.amax(-1) - probs_RV.amax(-1).log()
            rows_E = head.rows_E[edges] - rows.start
            logprobs_E[edges] = logits_RV[rows_E, head.targets_E[edges]] - lse_R[rows_E]
            entropy_R[rows] = lse_R - torch.linalg.vecdot(probs_RV, logits_RV)
        # A single chunk fits in memory by definition: keep it rather than compute it again.
        kept = probs_RV if len(chunks) == 1 else None
        ctx.save_for_backward(hidden_RC, weight_VC, kept)
        ctx.head, ctx.chunks = head, chunks
        ctx.mark_non_differentiable(entropy_R)
        return logprobs_E, entropy_R

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_E: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden_RC, weight_VC, kept_RV = ctx.saved_tensors
        head: HeadRows = ctx.head
        grad_hidden_RC = torch.empty_like(hidden_RC)
        grad_weight_VC = torch.zeros_like(weight_VC)
        for rows, edges in ctx.chunks:
            if kept_RV is None:
                grad_RV = _logits(hidden_RC, weight_VC, head, rows).softmax(-1)
            else:
                grad_RV = kept_RV
            rows_E = head.rows_E[edges] - rows.start
            pulls_E = grad_E[edges] / head.temperatures_R[rows][rows_E]
            total_R = grad_RV.new_zeros(grad_RV.shape[0]).index_add_(0, rows_E, pulls_E)
            # d logprob = onehot - softmax, summed over the edges that leave the row; in place, for
            # a table of all logits is the largest thing there is.
            grad_RV.mul_(-total_R[:, None])
            grad_RV.index_put_((rows_E, head.targets_E[edges]), pulls_E, accumulate=True)
            grad_hidden_RC[rows] = grad_RV @ weight_VC
            grad_weight_VC.addmm_(grad_RV.T, hidden_RC[rows])
        return grad_hidden_RC, grad_weight_VC, None, None


def edge_logprobs(
    hidden_LC: Tensor, weight_VC: Tensor, head: HeadRows, *, chunk_elements: int = CHUNK_ELEMENTS
) -> tuple[Tensor, Tensor]:
    """Log-probs [E] of a tree's edges, differentiable, and entropies [R] of its rows, not.

    Computed in fp32, or in fp64 if the hidden states are, whatever autocast says: log-prob
    differences between trainer and sampler are dominated by the precision of the head.
    """
    with torch.autocast(hidden_LC.device.type, enabled=False):
        wide = torch.promote_types(hidden_LC.dtype, torch.float32)
        hidden_RC = hidden_LC.index_select(0, head.places_R).to(wide)
        chunk_rows = max(1, chunk_elements // weight_VC.shape[0])
        logprobs_E, entropy_R = _EdgeLogprobs.apply(  # type: ignore[no-untyped-call]
            hidden_RC, weight_VC.to(wide), head, chunk_rows
        )
    return logprobs_E, entropy_R


def logits_logprobs(logits_RV: Tensor, head: HeadRows) -> tuple[Tensor, Tensor]:
    """The same from logits that the model itself computed for the rows."""
    wide = torch.promote_types(logits_RV.dtype, torch.float32)
    all_RV = (logits_RV.to(wide) / head.temperatures_R[:, None]).log_softmax(-1)
    entropy_R = -(all_RV.detach().exp() * all_RV.detach()).sum(-1)
    return all_RV[head.rows_E, head.targets_E], entropy_R


def _chunks(head: HeadRows, rows: int, chunk_rows: int) -> Iterator[tuple[slice, slice]]:
    """Row ranges with the range of edges that leave from each."""
    starts = torch.arange(0, rows + chunk_rows, chunk_rows, device=head.rows_E.device)
    starts.clamp_(max=rows)
    bounds = torch.searchsorted(head.rows_E, starts).tolist()
    for index in range(len(bounds) - 1):
        start = index * chunk_rows
        yield slice(start, min(start + chunk_rows, rows)), slice(bounds[index], bounds[index + 1])


def _logits(hidden_RC: Tensor, weight_VC: Tensor, head: HeadRows, rows: slice) -> Tensor:
    logits_RV: Tensor = (hidden_RC[rows] / head.temperatures_R[rows, None]) @ weight_VC.T
    return logits_RV
