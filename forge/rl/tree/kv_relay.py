"""Trees larger than a pass: keys and values are relayed forward between parts, gradients back.

Owns the exchange between parts of one tree that one process computes in sequence.
`forge.rl.tree.parts` divides a tree, `forge.rl.tree.passes` orders the passes.

In the forward, every part stores the keys and values of its tokens that later parts attend. In the
backward, parts run in reverse order, so the gradients of these keys and values from later parts
are complete when the part is differentiated. Every ancestor is computed once; the result is exact.

Shapes: N tokens that are attended by other parts, K key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from forge.rl.tree.parts import TreePart
from forge.rl.tree.state_relay import RelayedStates, relayed_states


@dataclass(frozen=True, slots=True, kw_only=True)
class Slots:
    """Places of a part's tokens among the N."""

    own: Tensor
    """Index in the part of each of its tokens that other parts attend."""
    own_slots: Tensor
    prefix_slots: Tensor
    """Places of the prefix tokens, in the order of the prefix."""

    def to(self, device: torch.device) -> Slots:
        """These slots on `device`."""
        return Slots(
            own=self.own.to(device),
            own_slots=self.own_slots.to(device),
            prefix_slots=self.prefix_slots.to(device),
        )


def shared_tokens(prefixes: Sequence[Tensor]) -> Tensor:
    """Layout indices [N] of all tokens in a part's prefix, ascending."""
    shared_N: Tensor = torch.unique(torch.cat(list(prefixes)))
    return shared_N


def shared_slots(spans: Sequence[tuple[int, int]], prefixes: Sequence[Tensor]) -> list[Slots]:
    """The slots of each part, given by its range and the layout indices of its prefix."""
    shared_N = shared_tokens(prefixes)
    slots = []
    for (start, end), prefix in zip(spans, prefixes, strict=True):
        first, last = torch.searchsorted(shared_N, torch.tensor([start, end])).tolist()
        slots.append(
            Slots(
                own=shared_N[first:last] - start,
                own_slots=torch.arange(first, last),
                prefix_slots=torch.searchsorted(shared_N, prefix),
            )
        )
    return slots


class KvRelay:
    """Keys and values of the N tokens in each layer, and their gradients so far."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._values: dict[int, tuple[Tensor, Tensor]] = {}
        self._grads: dict[int, tuple[Tensor, Tensor]] = {}

    def values(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, [1, K, N, D] each, of the type of `key` and `value`."""
        if layer not in self._values:
            self._values[layer] = (self._blank(key, key.dtype), self._blank(value, value.dtype))
        return self._values[layer]

    def grads(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of `values`, in fp32 or wider: many parts add to them."""
        if layer not in self._grads:
            wide = torch.promote_types(key.dtype, torch.float32)
            self._grads[layer] = (self._blank(key, wide), self._blank(value, wide))
        return self._grads[layer]

    def _blank(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        shape = (*like.shape[:2], self._size, like.shape[3])
        return torch.zeros(shape, dtype=dtype, device=like.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayPrefix:
    """A part's access to a relay."""

    relay: KvRelay
    slots: Slots
    states: RelayedStates
    """States of recurrent layers."""

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Stores keys and values for later parts; returns them with the prefix before them."""
        keys, values = _Relayed.apply(key, value, self, layer)  # type: ignore[no-untyped-call]
        return keys, values


def relay_prefixes(parts: Sequence[TreePart]) -> list[RelayPrefix]:
    """Access of each part of a tree to a new relay."""
    slots = shared_slots([part.span for part in parts], [part.prefix_P for part in parts])
    relay = KvRelay(sum(len(one.own) for one in slots))
    return [
        RelayPrefix(relay=relay, slots=one, states=states)
        for one, states in zip(slots, relayed_states(parts), strict=True)
    ]


class _Relayed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, key: Tensor, value: Tensor, prefix: RelayPrefix, layer: int
    ) -> tuple[Tensor, ...]:
        ctx.prefix, ctx.layer = prefix, layer
        slots = prefix.slots.to(key.device)
        whole = []
        for left, own in zip(prefix.relay.values(layer, key, value), (key, value), strict=True):
            left[:, :, slots.own_slots] = own[:, :, slots.own]
            whole.append(torch.cat([left[:, :, slots.prefix_slots], own], dim=2))
        return tuple(whole)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        prefix: RelayPrefix = ctx.prefix
        slots = prefix.slots.to(grads[0].device)
        size = len(slots.prefix_slots)
        owed = prefix.relay.grads(ctx.layer, *grads)
        own = []
        for arrived, grad in zip(owed, grads, strict=True):
            arrived.index_add_(2, slots.prefix_slots, grad[:, :, :size].to(arrived.dtype))
            mine = grad[:, :, size:].clone()
            mine[:, :, slots.own] += arrived[:, :, slots.own_slots].to(mine.dtype)
            own.append(mine)
        return (*own, None, None)
