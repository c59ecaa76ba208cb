"""Log-probabilities from the backbone's states, without a table of all logits.

Owns the last norm and the language-model head during training: both run in fp32 or wider, for the
requested rows, one chunk at a time. For its backward a row keeps only the state before the norm;
the rest is recomputed. `forge.rl.tree.batch` chooses the rows.

Shapes: L tokens of a pass, R rows, r those of a chunk, E edges, C hidden channels, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from forge.rl.model.backbone import BackboneOutput
from forge.rl.model.wide_products import products_of
from forge.rl.tree.parts import HeadRows

CHUNK_ELEMENTS = 1 << 26
"""Most logits in one table: 256 MiB in fp32."""
CHUNK_ROWS = 256
"""Rows of a table of logits, or channels if larger: beyond it a table saves no time. A quarter of
it costs little."""
KEPT_STATES = 4
"""Probabilities kept for the backward instead of recomputed, as a multiple of the elements of the
pass's states. The backward of the backbone's layers adds about seven times those elements."""
TABLE_STATES = 3
"""The same multiple for the two tables in use: together they do not raise the peak of memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Logits:
    """Operations on a model's logits: add a bias, scale, then cap."""

    bias_V: Tensor | None = None
    """The head's bias; None: it has none."""
    scale: float = 1.0
    softcap: float = 0.0
    """Bound by a tanh; 0: none."""


PLAIN = Logits()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """The rows that a head computes, and how."""

    head: HeadRows
    norm: Callable[[Tensor], Tensor] | None
    wide: torch.dtype
    chunks: Sequence[tuple[slice, slice]]
    """Ranges of rows, each with the range of edges that leave from it."""
    kept_elements: int
    entropy_gradient: bool
    logits: Logits
    backbone_type: torch.dtype | None
    """Type of autocast; None without autocast."""

    def scaled(self, states_rC: Tensor, chunk: slice) -> Tensor:
        """The input of the head's matrix product: normed states times the logits' scale, over the
        temperature unless the logits are capped before it."""
        normed_rC = (states_rC if self.norm is None else self.norm(states_rC)).to(self.wide)
        if self.logits.softcap:
            return normed_rC * self.logits.scale
        return normed_rC / (self._temperatures(chunk) / self.logits.scale)

    def finish(self, logits_rV: Tensor, bias_V: Tensor | None, chunk: slice) -> Tensor | None:
        """Adds the bias in place; caps logits and divides them by the temperature, and returns the
        slopes of this."""
        if bias_V is not None:
            logits_rV.addr_(self.bias_factors(chunk), bias_V)
        if not self.logits.softcap:
            return None
        temperatures_r1 = self._temperatures(chunk)
        bent_rV = logits_rV.div_(self.logits.softcap).tanh_()
        slopes_rV = (1 - bent_rV.square()).div_(temperatures_r1)
        bent_rV.mul_(self.logits.softcap / temperatures_r1)
        return slopes_rV

    def bias_factors(self, chunk: slice) -> Tensor:
        """[r] factor of the bias in the sum with the product that `scaled` prepares."""
        scales_r = torch.full_like(
            self.head.temperatures_R[chunk], self.logits.scale, dtype=self.wide
        )
        return scales_r if self.logits.softcap else scales_r / self._temperatures(chunk)[:, 0]

    def _temperatures(self, chunk: slice) -> Tensor:
        return self.head.temperatures_R[chunk, None].to(self.wide)


class _EdgeLogprobs(torch.autograd.Function):
    """log softmax(norm(s) W^T / temperature)[target] per edge, and the entropy of each row."""

    @staticmethod
    def forward(
        ctx: Any,
        states_RC: Tensor,
        weight_VC: Tensor,
        bias_V: Tensor | None,
        rows: _Rows,
        *norm: Tensor,
    ) -> tuple[Tensor, Tensor]:
        head = rows.head
        logprobs_E = weight_VC.new_empty(head.rows_E.shape)
        entropy_R = weight_VC.new_empty(states_RC.shape[:1])
        left = rows.kept_elements if any(ctx.needs_input_grad) else 0
        if rows.logits.softcap:
            left = 0  # the backward needs the slopes, too
        ctx.kept = {}  # not saved_tensors: the backward frees each one after its use
        products = products_of(weight_VC, backbone=rows.backbone_type)
        for chunk, edges in rows.chunks:
            logits_rV = products.logits(rows.scaled(states_RC[chunk], chunk))
            rows.finish(logits_rV, bias_V, chunk)
            probs_rV = logits_rV.softmax(-1)
            # log sum exp by the likeliest token, which costs two reads and no table of its own.
            lse_r = logits_rV.amax(-1) - probs_rV.amax(-1).log()
            rows_E = head.rows_E[edges] - chunk.start
            logprobs_E[edges] = logits_rV[rows_E, head.targets_E[edges]] - lse_r[rows_E]
            entropy_R[chunk] = lse_r - (logits_rV.mul_(probs_rV)).sum(-1)
            left -= probs_rV.numel()
            if left >= 0:
                ctx.kept[chunk.start] = probs_rV
            del logits_rV, probs_rV  # ahead of the next ones, not after
        ctx.rows = rows
        if rows.entropy_gradient:
            ctx.save_for_backward(states_RC, weight_VC, bias_V, entropy_R, *norm)
        else:
            ctx.save_for_backward(states_RC, weight_VC, bias_V, *norm)
            ctx.mark_non_differentiable(entropy_R)
        return logprobs_E, entropy_R

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_E: Tensor, grad_R: Tensor) -> tuple[Tensor | None, ...]:
        states_RC, weight_VC, bias_V, *norm = ctx.saved_tensors
        rows: _Rows = ctx.rows
        entropy_R = norm.pop(0) if rows.entropy_gradient else None
        head, products = rows.head, products_of(weight_VC, backbone=rows.backbone_type)
        grad_states_RC = torch.empty_like(states_RC)
        grad_weight_VC = torch.zeros_like(weight_VC) if ctx.needs_input_grad[1] else None
        grad_bias_V = torch.zeros_like(bias_V) if ctx.needs_input_grad[2] else None
        trained = [one for one in norm if one.requires_grad]
        grad_norm = [torch.zeros_like(one) for one in trained]
        for chunk, edges in rows.chunks:
            states_rC = states_RC[chunk].detach().requires_grad_()
            with torch.enable_grad():
                graph_rC = rows.scaled(states_rC, chunk)
            scaled_rC = graph_rC.detach()
            grad_rV, slopes_rV = ctx.kept.pop(chunk.start, None), None
            if grad_rV is None:
                logits_rV = products.logits(scaled_rC)
                slopes_rV = rows.finish(logits_rV, bias_V, chunk)
                grad_rV = logits_rV.softmax(-1)
                del logits_rV
            picked = (head.rows_E[edges] - chunk.start, head.targets_E[edges])
            entropy = None if entropy_R is None else (entropy_R[chunk], grad_R[chunk])
            _to_logit_gradient(grad_rV, picked, grad_E[edges], entropy)
            if slopes_rV is not None:
                grad_rV.mul_(slopes_rV)
            if grad_weight_VC is not None:
                products.add_to_weight(grad_weight_VC, grad_rV, scaled_rC)
            if grad_bias_V is not None:
                grad_bias_V.addmv_(grad_rV.T, rows.bias_factors(chunk))
            grad_states_RC[chunk], *shares = torch.autograd.grad(
                graph_rC, [states_rC, *trained], products.to_states(grad_rV)
            )
            for total, share in zip(grad_norm, shares, strict=True):
                total += share
            del grad_rV, slopes_rV  # ahead of the next ones
        given = iter(grad_norm)
        grads = (next(given) if one.requires_grad else None for one in norm)
        return grad_states_RC, grad_weight_VC, grad_bias_V, None, *grads


def _to_logit_gradient(
    probs_rV: Tensor,
    picked: tuple[Tensor, Tensor],
    grad_E: Tensor,
    entropy: tuple[Tensor, Tensor] | None,
) -> None:
    """Turns probabilities into the gradient of their logits. In place: no other tensor is as large.

    d logprob = onehot - softmax, summed over the edges that leave the row; d entropy = -p (log p +
    entropy). `picked`: row and token of each edge; `entropy`: value and gradient by row.
    """
    total_r = probs_rV.new_zeros(probs_rV.shape[0]).index_add_(0, picked[0], grad_E)
    if entropy is None:
        probs_rV.mul_(-total_r[:, None])
    else:
        entropy_r, grad_r = entropy
        surprise_rV = torch.special.entr(probs_rV).mul_(grad_r[:, None])
        total_r += grad_r * entropy_r
        probs_rV.mul_(-total_r[:, None]).add_(surprise_rV)
    probs_rV.index_put_(picked, grad_E, accumulate=True)


def edge_logprobs(
    states_LC: Tensor,
    weight_VC: Tensor,
    head: HeadRows,
    *,
    norm: nn.Module | None = None,
    logits: Logits = PLAIN,
    chunk_rows: int = 0,
    entropy_gradient: bool = False,
    backbone_type: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probs [E] of a tree's edges, differentiable, and entropies [R] of its rows, which are
    differentiable with `entropy_gradient` alone.

    `norm` is applied between states and head, if there is one. `chunk_rows` = 0 chooses the size.
    Computed in fp32, or fp64 if the states are, also under autocast: the precision of the head
    dominates the log-prob differences between trainer and sampler. `backbone_type` is that of
    autocast: gradients of a head over a bf16 backbone may be rounded like those of the backbone
    (`forge.rl.model.wide_products`).
    """
    with torch.autocast(states_LC.device.type, enabled=False):
        wide = torch.promote_types(states_LC.dtype, torch.float32)
        states_RC = states_LC.index_select(0, head.places_R)
        size = chunk_rows or table_rows(states_LC.numel(), weight_VC.shape)
        rows = _Rows(
            head=head,
            norm=norm,
            wide=wide,
            chunks=list(_chunks(head, len(states_RC), size)),
            kept_elements=kept_elements(states_LC.numel()),
            entropy_gradient=entropy_gradient,
            logits=logits,
            backbone_type=backbone_type,
        )
        parameters = () if norm is None else tuple(norm.parameters())
        bias_V = None if logits.bias_V is None else logits.bias_V.to(wide)
        logprobs_E, entropy_R = _EdgeLogprobs.apply(  # type: ignore[no-untyped-call]
            states_RC, weight_VC.to(wide), bias_V, rows, *parameters
        )
    return logprobs_E, entropy_R


def distributions(
    states_RC: Tensor, weight_VC: Tensor, temperatures_R: Tensor, logits: Logits
) -> Tensor:
    """[R, V] log-probs over the next token, fp32 or wider; `logits`, then the temperature, change
    the product. Differentiable with respect to the states alone."""
    wide = torch.promote_types(states_RC.dtype, torch.float32)
    logits_RV = states_RC.to(wide) @ (weight_VC.detach().to(wide).T * logits.scale)
    if logits.bias_V is not None:
        logits_RV = logits_RV + logits.bias_V.detach().to(wide) * logits.scale
    if logits.softcap:
        logits_RV = torch.tanh(logits_RV / logits.softcap) * logits.softcap
    return (logits_RV / temperatures_R[:, None]).log_softmax(-1)


def edge_values(
    states_LC: Tensor, value_head: nn.Linear, head: HeadRows, *, norm: nn.Module | None
) -> Tensor:
    """[E] value of the state that each edge leaves, in fp32 or wider."""
    with torch.autocast(states_LC.device.type, enabled=False):
        states_RC = states_LC.index_select(0, head.places_R)
        if norm is not None:
            states_RC = norm(states_RC)
        wide = torch.promote_types(states_RC.dtype, torch.float32)
        weight, bias = value_head.weight.to(wide), value_head.bias.to(wide)
        values_R: Tensor = states_RC.to(wide) @ weight[0] + bias
    return values_R[head.rows_E]


def edge_columns(
    backbone: BackboneOutput,
    head: HeadRows,
    *,
    logits_RV: Tensor | None,
    weight_VC: Tensor,
    logits: Logits,
    value_head: nn.Linear | None,
    entropy_gradient: bool,
    backbone_type: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    """All that a loss takes from a pass: differentiable columns, and entropies [E] without
    gradient. The columns are log-probs [E], or [E, k]: log-probs, then values with `value_head`,
    then entropies with `entropy_gradient`. `logits_RV` are the model's own, if it computed them."""
    if logits_RV is not None:
        logprobs_E, entropy_R = logits_logprobs(logits_RV, head, entropy_gradient=entropy_gradient)
    else:
        logprobs_E, entropy_R = edge_logprobs(
            backbone.states_LC,
            weight_VC,
            head,
            norm=backbone.norm,
            logits=logits,
            entropy_gradient=entropy_gradient,
            backbone_type=backbone_type,
        )
    columns = [logprobs_E]
    if value_head is not None:
        columns.append(edge_values(backbone.states_LC, value_head, head, norm=backbone.norm))
    entropy_E = entropy_R[head.rows_E]
    if entropy_gradient:
        columns.append(entropy_E)
    columns_E = torch.stack(columns, dim=1) if len(columns) > 1 else logprobs_E
    return columns_E, entropy_E.detach()


def kept_elements(states: int) -> int:
    """Most probabilities kept for the backward, by the elements of a pass's states."""
    return min(KEPT_STATES * states, CHUNK_ELEMENTS)


def table_rows(states: int, weight_shape: tuple[int, ...]) -> int:
    """Number of rows of logits computed at once; two such tables exist at a time."""
    vocabulary, channels = weight_shape
    # With tables as large as the weight, accumulating its gradient is a small part of the work.
    wanted = max(channels, CHUNK_ROWS)
    spared = TABLE_STATES * states // (2 * vocabulary)
    return min(max(spared, wanted // 4), wanted, max(1, CHUNK_ELEMENTS // vocabulary))


def logits_logprobs(
    logits_RV: Tensor, head: HeadRows, *, entropy_gradient: bool
) -> tuple[Tensor, Tensor]:
    """Like `edge_logprobs`, from logits that the model itself computed for the rows."""
    wide = torch.promote_types(logits_RV.dtype, torch.float32)
    all_RV = (logits_RV.to(wide) / head.temperatures_R[:, None]).log_softmax(-1)
    values_RV = all_RV if entropy_gradient else all_RV.detach()
    return all_RV[head.rows_E, head.targets_E], -(values_RV.exp() * values_RV).sum(-1)


def _chunks(head: HeadRows, rows: int, chunk_rows: int) -> Iterator[tuple[slice, slice]]:
    """Row ranges with the range of edges that leave from each."""
    starts = torch.arange(0, rows + chunk_rows, chunk_rows, device=head.rows_E.device)
    starts.clamp_(max=rows)
    bounds = torch.searchsorted(head.rows_E, starts).tolist()
    for index in range(len(bounds) - 1):
        start = index * chunk_rows
        yield slice(start, min(start + chunk_rows, rows)), slice(bounds[index], bounds[index + 1])
