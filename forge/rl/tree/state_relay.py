"""States of recurrent layers between the parts of a tree: forward to later parts, gradients back.

What `forge.rl.tree.kv_relay` does for keys and values, for the states after single tokens: those
that nodes of later parts begin with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from forge.rl.attention.forks import State, own_chains
from forge.rl.tree.parts import TreePart

_Place = tuple[int, int]
"""A layer and a layout index."""


class StateRelay:
    """States by layer and token, and their gradients so far."""

    def __init__(self) -> None:
        self.values: dict[_Place, State] = {}
        self.grads: dict[_Place, State] = {}

    def add_grads(self, place: _Place, grads: Mapping[tuple[str, int], Tensor]) -> None:
        """Add gradients of a state, in fp32 or wider: many parts add to them."""
        total = self.grads.setdefault(place, {})
        for key, grad in grads.items():
            wide = grad.to(torch.promote_types(grad.dtype, torch.float32))
            total[key] = total[key] + wide if key in total else wide


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayedStates:
    """A part's access to a relay."""

    relay: StateRelay
    prefix: Sequence[int]
    """Layout index of each token of its prefix."""
    start: int
    """Layout index of its first own token."""
    wanted: frozenset[int]
    """Own tokens, in the part's layout with the prefix, whose states other parts need to begin."""

    def enter(self, layer: int, hidden_LC: Tensor) -> Tensor:
        """The input as it is: earlier parts have stored their states."""
        return hidden_LC

    def before(self, layer: int, token: int) -> State:
        """The state after a token of the prefix, differentiable."""
        place = (layer, self.prefix[token])
        keys = tuple(self.relay.values[place])
        anchor = torch.zeros((), requires_grad=True)
        values = _Taken.apply(anchor, self.relay, place)  # type: ignore[no-untyped-call]
        return dict(zip(keys, values, strict=True))

    def keep(self, layer: int, output_LC: Tensor, states: Mapping[int, State]) -> Tensor:
        """Stores the states that other parts want, by token of the part's layout with its prefix.
        Returns the output, whose backward takes their gradients."""
        for token, state in states.items():
            if token in self.wanted:
                place = (layer, token - len(self.prefix) + self.start)
                output_LC = _Left.apply(  # type: ignore[no-untyped-call]
                    output_LC, self.relay, place, tuple(state), *state.values()
                )
        return output_LC


def relayed_states(parts: Sequence[TreePart]) -> list[RelayedStates]:
    """Access of each part of a tree to a new relay."""
    relay = StateRelay()
    prefixes = [part.prefix_P.tolist() for part in parts]
    begun = {
        prefix[parent]
        for part, prefix in zip(parts, prefixes, strict=True)
        for _, _, parent in own_chains(part.schedule.nodes, prefix=len(prefix))
        if 0 <= parent < len(prefix)
    }
    found = []
    for part, prefix in zip(parts, prefixes, strict=True):
        start, _ = part.span
        wanted = (place - start + len(prefix) for place in begun)
        own = frozenset(one for one in wanted if len(prefix) <= one < len(prefix) + part.tokens)
        found.append(RelayedStates(relay=relay, prefix=prefix, start=start, wanted=own))
    return found


class _Taken(torch.autograd.Function):
    """A state of the relay; its gradient goes there. The anchor makes it differentiable."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, relay: StateRelay, place: _Place) -> tuple[Tensor, ...]:
        ctx.relay, ctx.place = relay, place
        return tuple(one.clone() for one in relay.values[place].values())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        ctx.relay.add_grads(ctx.place, dict(zip(ctx.relay.values[ctx.place], grads, strict=True)))
        return None, None, None


class _Left(torch.autograd.Function):
    """Leaves a state in the relay; its gradient comes from there."""

    @staticmethod
    def forward(
        ctx: Any,
        output_LC: Tensor,
        relay: StateRelay,
        place: _Place,
        keys: tuple[tuple[str, int], ...],
        *values: Tensor,
    ) -> Tensor:
        ctx.relay, ctx.place, ctx.keys = relay, place, keys
        ctx.types = [one.dtype for one in values]
        relay.values[place] = {key: one.detach() for key, one in zip(keys, values, strict=True)}
        return output_LC.view_as(output_LC)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_LC: Tensor) -> tuple[Tensor | None, ...]:
        arrived = ctx.relay.grads.get(ctx.place, {})
        grads = (
            arrived[key].to(kind) if key in arrived else None
            for key, kind in zip(ctx.keys, ctx.types, strict=True)
        )
        return grad_LC, None, None, None, *grads
