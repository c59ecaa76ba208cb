"""Several forward passes as one differentiable computation.

Owns running passes in sequence with bounded memory: only the last passes keep their activations;
the backward runs the others again, in reverse order, with the gradient of their results. The loss
gets all log-probs of a tree at once, so every objective is exact for any number of passes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from forge.rl.random_state import random_state, set_random_state


@dataclass(frozen=True, slots=True, kw_only=True)
class PassOutput:
    """Results of a pass for the edges of its part."""

    logprobs_E: Tensor
    """Differentiable; with a critic a second column has the values."""
    entropy_E: Tensor
    mass_X: Tensor | None = None
    """Probability mass per expert, differentiable; None without load balance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """The passes of a tree."""

    run: Callable[[int], PassOutput]
    """Computes one pass; the backward calls it again with the same index."""
    edges: Sequence[Tensor]
    """Edges of the tree in each pass: disjoint, together all edges."""
    kept: int
    """Number of last passes that keep their activations."""
    extra_loss: Callable[[PassOutput], Tensor | None]
    """A loss of a pass besides that on its log-probs, called after all forward passes."""
    device: torch.device
    """Device of the passes. A repeated pass has the same random numbers, also those of the host."""


def run_passes(passes: Passes) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies [E] of a whole tree; the gradient goes to the parameters only."""
    anchor = torch.zeros((), requires_grad=True)
    logprobs_E, entropy_E = _Passes.apply(  # type: ignore[no-untyped-call]
        anchor, passes, torch.is_grad_enabled()
    )
    return logprobs_E, entropy_E


class _Passes(torch.autograd.Function):
    """Gradients of parameters are accumulated by the inner backward, as in checkpointing."""

    @staticmethod
    def forward(ctx: Any, _: Tensor, passes: Passes, differentiable: bool) -> tuple[Tensor, ...]:
        count = len(passes.edges)
        first_kept = count - passes.kept if differentiable else count
        outputs, ctx.draws = [], []
        for index in range(count):
            ctx.draws.append(random_state(passes.device))
            with torch.set_grad_enabled(index >= first_kept):
                outputs.append(passes.run(index))
        ctx.passes, ctx.kept = passes, dict(enumerate(outputs[first_kept:], first_kept))
        entropy_E = _gathered(passes, [one.entropy_E for one in outputs])
        ctx.mark_non_differentiable(entropy_E)
        return _gathered(passes, [one.logprobs_E.detach() for one in outputs]), entropy_E

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_E: Tensor, _: Tensor) -> tuple[None, ...]:
        passes: Passes = ctx.passes
        for index in reversed(range(len(passes.edges))):
            with torch.enable_grad():
                output = ctx.kept.pop(index, None) or _again(passes, index, ctx.draws[index])
                extra = passes.extra_loss(output)
            roots, grads = [output.logprobs_E], [grad_E[passes.edges[index].to(grad_E.device)]]
            if extra is not None:
                roots.append(extra)
                grads.append(torch.ones_like(extra))
            torch.autograd.backward(roots, grads)
        return None, None, None


def _again(passes: Passes, index: int, draws: Mapping[str, Tensor]) -> PassOutput:
    """Run a pass again with its random numbers; the current random state stays as it was."""
    device = passes.device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        set_random_state(draws, device)
        return passes.run(index)


def _gathered(passes: Passes, columns: Sequence[Tensor]) -> Tensor:
    edges = torch.cat(list(passes.edges)).to(columns[0].device)
    values = torch.cat(list(columns))
    return torch.empty_like(values).index_copy_(0, edges, values)


class _WithLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, loss: Tensor) -> Tensor:
        ctx.ones = torch.ones_like(loss)
        return values.view_as(values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, ctx.ones


def with_loss(values: Tensor, loss: Tensor) -> Tensor:
    """`values`, with a backward that includes that of `loss`."""
    out: Tensor = _WithLoss.apply(values, loss)  # type: ignore[no-untyped-call]
    return out
