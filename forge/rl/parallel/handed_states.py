"""States of recurrent layers between ranks that share a tree.

What `forge.rl.parallel.context_parallel` does for keys and values, for the states after single
tokens. In depth-first order a range begins only with states of earlier ranks, so a layer takes
turns: rank 0 computes its range and hands out states, then rank 1, and so on. In the backward the
turns are in reverse order. All ranks join every turn, so that one without memory is heard by all,
and a turn without states is none. Only recurrent layers take turns; the rest of a model is computed
at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from forge.core.prefix_tree import Span
from forge.rl.attention.forks import State, own_chains
from forge.rl.collectives import all_reduce, broadcast_tensors
from forge.rl.tree.parts import TreeLayout, TreePart, part_nodes, path_to

_Key = tuple[int, tuple[str, int]]
"""A layout index, and the kind and number of a tensor of its state."""


def handed_places(layout: TreeLayout, spans: Sequence[Span]) -> list[tuple[int, ...]]:
    """Layout indices of the tokens of each range with states that other ranges begin with."""
    begun: set[int] = set()
    for span in spans:
        if span[0] == span[1]:
            continue
        path = path_to(layout, span[0]).tolist()
        chains = own_chains(part_nodes(layout, span), prefix=len(path))
        begun.update(path[parent] for _, _, parent in chains if 0 <= parent < len(path))
    return [tuple(sorted(one for one in begun if start <= one < end)) for start, end in spans]


def handed_states(
    layout: TreeLayout,
    spans: Sequence[Span],
    part: TreePart,
    *,
    rank: int,
    group: dist.ProcessGroup,
) -> HandedStates:
    """The access of the rank that computes `part`; `spans` are the ranges of all ranks."""
    return HandedStates(
        group=group,
        rank=rank,
        places=handed_places(layout, spans),
        prefix=part.prefix_P.tolist(),
        start=spans[rank][0],
    )


@dataclass(slots=True, kw_only=True)
class HandedStates:
    """One rank's access to the states of the others; see `PrefixStates`."""

    group: dist.ProcessGroup
    rank: int
    places: Sequence[Sequence[int]]
    """Result of `handed_places`: the layout indices that each rank hands out."""
    prefix: Sequence[int]
    """Layout index of each token of this rank's prefix."""
    start: int
    """Layout index of its first own token."""
    states: dict[int, dict[int, State]] = field(default_factory=dict)
    """Received states by layer, then by layout index, while the layer is computed."""
    outlines: dict[tuple[int, int], list[tuple[_Key, torch.Size]]] = field(default_factory=dict)
    """The tensors of a turn, by layer and rank."""

    @property
    def wanted(self) -> frozenset[int]:
        """Own tokens whose states other ranks need to begin, as indices of this rank's layout with
        the prefix."""
        shift = len(self.prefix) - self.start
        return frozenset(place + shift for place in self.places[self.rank])

    def turns(self, *, after: bool) -> list[int]:
        """The ranks that hand out states before this one, or with `after` this one and later."""
        giving = [rank for rank, places in enumerate(self.places) if places]
        return [rank for rank in giving if (rank >= self.rank) == after]

    def enter(self, layer: int, hidden_LC: Tensor) -> Tensor:
        """Receive the states of the ranks before; returns the layer's input."""
        if not self.turns(after=False):
            return hidden_LC
        anchor = torch.zeros((), requires_grad=True)
        hidden_LC, *arrived = _Received.apply(anchor, hidden_LC, self, layer)  # type: ignore[no-untyped-call]
        keys = [key for rank in self.turns(after=False) for key, _ in self.outlines[layer, rank]]
        for (place, name), value in zip(keys, arrived, strict=True):
            self.states.setdefault(layer, {}).setdefault(place, {})[name] = value
        return hidden_LC

    def before(self, layer: int, token: int) -> State:
        """The state after a token of the prefix, differentiable."""
        return self.states[layer][self.prefix[token]]

    def keep(self, layer: int, output_LC: Tensor, states: Mapping[int, State]) -> Tensor:
        """Hand out this rank's states, and join the turns of the ranks after it. Returns the
        output, whose backward takes the gradients of the states."""
        self.states.pop(layer, None)
        if not self.turns(after=True):
            return output_LC
        shift = len(self.prefix) - self.start
        own = {
            (place, name): value
            for place in self.places[self.rank]
            for name, value in states[place + shift].items()
        }
        out: Tensor = _Handed.apply(output_LC, self, layer, tuple(own), *own.values())  # type: ignore[no-untyped-call]
        return out

    def exchange(
        self, layer: int, turn: int, own: Mapping[_Key, Tensor], like: Tensor
    ) -> list[Tensor]:
        """The tensors of a rank's turn; `own` are those of this rank if it is its turn."""
        found = broadcast_tensors(own, self.group, source=turn, device=like.device)
        self.outlines[layer, turn] = [(key, one.shape) for key, one in found.items()]
        return [*found.values()]

    def owed(
        self, layer: int, turn: int, grads: Mapping[_Key, Tensor | None], like: Tensor
    ) -> list[Tensor]:
        """Gradients of the tensors of a rank's turn, summed over all ranks."""
        outline = self.outlines[layer, turn]
        wide = torch.promote_types(like.dtype, torch.float32)
        parts = [
            torch.zeros(shape.numel(), dtype=wide, device=like.device)
            if (grad := grads.get(key)) is None
            else grad.to(wide).flatten()
            for key, shape in outline
        ]
        total = torch.cat(parts)
        all_reduce(total, self.group)
        sizes = [shape.numel() for _, shape in outline]
        return [
            one.reshape(shape)
            for one, (_, shape) in zip(torch.split(total, sizes), outline, strict=True)
        ]


class _Received(torch.autograd.Function):
    """The input of a layer, with the states of the ranks before; their gradients go there. The
    anchor makes them differentiable, and the input lets every rank join the backward's turns."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, hidden_LC: Tensor, handed: HandedStates, layer: int
    ) -> tuple[Tensor, ...]:
        ctx.handed, ctx.layer = handed, layer
        ctx.needs_input = hidden_LC.requires_grad
        arrived = [
            value
            for turn in handed.turns(after=False)
            for value in handed.exchange(layer, turn, {}, hidden_LC)
        ]
        return hidden_LC.view_as(hidden_LC), *arrived

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_LC: Tensor, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        handed: HandedStates = ctx.handed
        turns = handed.turns(after=False)
        keys = [key for turn in turns for key, _ in handed.outlines[ctx.layer, turn]]
        given = dict(zip(keys, grads, strict=True))
        for turn in reversed(turns):
            handed.owed(ctx.layer, turn, given, grad_LC)
        return None, grad_LC if ctx.needs_input else None, None, None


class _Handed(torch.autograd.Function):
    """The output of a layer, after the turns of this rank and later ones."""

    @staticmethod
    def forward(
        ctx: Any,
        output_LC: Tensor,
        handed: HandedStates,
        layer: int,
        keys: tuple[_Key, ...],
        *values: Tensor,
    ) -> Tensor:
        ctx.handed, ctx.layer, ctx.keys = handed, layer, keys
        ctx.types = [one.dtype for one in values]
        for turn in handed.turns(after=True):
            own = dict(zip(keys, values, strict=True)) if turn == handed.rank else {}
            handed.exchange(layer, turn, own, output_LC)
        # Recomputed activations end at the last saved tensor, and so include these turns.
        ctx.save_for_backward(output_LC.new_zeros(()))
        return output_LC.view_as(output_LC)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_LC: Tensor) -> tuple[Tensor | None, ...]:
        ctx.saved_tensors  # noqa: B018 - recomputes the layer first
        handed: HandedStates = ctx.handed
        own: list[Tensor] = []
        for turn in reversed(handed.turns(after=True)):
            owed = handed.owed(ctx.layer, turn, {}, grad_LC)
            if turn == handed.rank:
                own = [one.to(kind) for one, kind in zip(owed, ctx.types, strict=True)]
        return grad_LC, None, None, None, *own
