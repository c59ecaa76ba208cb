"""Recurrent layers over a prefix tree: a node hands its state to each of its children.

Owns the forward that replaces a recurrent layer's own in a merged pass. It runs the layer's own
forward on one batch of nodes after the other (`forge.rl.tree.forks`), and stands in for the cache
that transformers hands to such layers: that of a node begins with the state after its parent, and
is differentiable. `forge.rl.model.probe` decides by computing which models this is right for.

A layer's state is what its cache has: the last inputs of its convolution, and the recurrent state.
It may have pending tokens besides.

Shapes: B nodes of a batch, T tokens of each, L tokens of the pass, C hidden channels.
"""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from forge.core.errors import InvalidArgument
from forge.rl import scans
from forge.rl.attention.forks import ROOT, After, ForkBatch, State, plan_forks
from forge.rl.attention.tree_attention import Prefix, TreeInput, current_tree
from forge.rl.begun_scan import STATE
from forge.rl.model import lightning
from forge.rl.model.state_cache import StateCache
from forge.rl.tree.parts import TreePart

CACHE_NAMES = ("cache_params", "past_key_values")
"""Names of the cache in the forward of recurrent layers."""
NO_PARTS = "its layers are recurrent; use mesh.dp_shard and mesh.cp"
"""Why ranks cannot divide such layers."""
PENDING = ("pending", 0)
"""In a state: inputs of the layer that are still to be computed, [1, tokens, C]."""


def fork_states(model: nn.Module) -> bool:
    """Let the recurrent layers of a model compute trees; whether it has any. Passes without the
    keyword `tree` stay as they are. Idempotent."""
    lightning.adopt(model)
    layers = [one for one in model.modules() if is_recurrent(one)]
    for index, layer in enumerate(layers):
        layer._forge_index = index  # type: ignore[assignment]
        # A bound method, so that a copy of the model has its own.
        layer.forward = MethodType(_forward, layer)
    if layers:
        scans.patch(model)
    return bool(layers)


def is_recurrent(module: nn.Module) -> bool:
    """Whether `fork_states` lets this layer compute trees."""
    # transformers 5.17 has Mamba 1 without functions.
    begins = not hasattr(module, "dt_proj") or scans.begins_with_states(module)
    return begins and bool(cache_name(module))


def cache_name(module: nn.Module) -> str:
    """Name of the cache in the forward of a recurrent layer; "" for another module."""
    convolves = any(isinstance(child, nn.Conv1d) for child in module.children())
    if not convolves and not isinstance(module, lightning.LightningAttention):
        return ""
    parameters = signature(type(module).forward).parameters
    return next((name for name in CACHE_NAMES if name in parameters), "")


def tree_input(part: TreePart, prefix: Prefix | None, *, forked: bool) -> TreeInput:
    """The tree of a pass; `forked`: the model has recurrent layers."""
    schedule = part.schedule
    if not forked:
        return TreeInput(schedule=schedule, prefix=prefix)
    states = None if prefix is None else prefix.states
    wanted = frozenset[int]() if states is None else states.wanted
    forks = plan_forks(schedule.nodes, prefix=schedule.prefix, wanted=wanted)
    return TreeInput(schedule=schedule, prefix=prefix, forks=forks, states=states)


def _forward(
    layer: nn.Module,
    hidden_states: Tensor,
    *places: Any,
    tree: TreeInput | None = None,
    **named: Any,
) -> Tensor:
    """The layer's own forward, on each batch of nodes if there is a tree."""
    own, tree = type(layer).forward, tree or current_tree()
    if tree is None or tree.forks is None:
        plain: Tensor = own(layer, hidden_states, *places, **named)
        return plain
    index: int = layer._forge_index  # type: ignore[assignment]
    if tree.states is not None:
        hidden_states = tree.states.enter(index, hidden_states)
    name, states, outputs = cache_name(layer), dict[int, State](), []
    for batch in tree.forks.batches:
        nodes_BTC = hidden_states[0][batch.places_BT.to(hidden_states.device)]
        before = _before(batch, index, states, tree)
        pending = before.pop(PENDING, nodes_BTC[:, :0])
        cache = _NodeCache(before)
        with scans.handled(cache.scan):
            output = own(layer, torch.cat([pending, nodes_BTC], dim=1), **(named | {name: cache}))
        if not isinstance(output, Tensor):
            raise InvalidArgument(f"{type(layer).__name__} returns more than its output")
        outputs.append(output[:, pending.shape[1] :].flatten(0, 1))
        if batch.after is After.PENDING:
            after = before | {PENDING: torch.cat([pending, nodes_BTC[:, :1]], dim=1)}
        else:
            after = cache.after
        if batch.after is not After.NOTHING:
            for row, last in enumerate(batch.lasts):
                states[last] = {key: one[row : row + 1] for key, one in after.items()}
    output_LC = torch.cat(outputs)[tree.forks.outputs_L.to(hidden_states.device)]
    if tree.states is not None:
        output_LC = tree.states.keep(index, output_LC, states)
    return output_LC[None]


def _before(batch: ForkBatch, index: int, states: Mapping[int, State], tree: TreeInput) -> State:
    """The states that the nodes of a batch begin with, stacked; empty at roots."""
    if batch.parents[0] == ROOT:
        return {}
    found = []
    for parent in batch.parents:
        if parent in states:
            found.append(states[parent])
        else:
            assert tree.states is not None, "only a part has parents elsewhere"
            found.append(tree.states.before(index, parent))
    return {key: torch.cat([one[key] for one in found]) for key in found[0]}


class _NodeCache(StateCache):
    """The cache of one layer for a batch of nodes; empty at roots."""

    def __init__(self, before: State) -> None:
        super().__init__(before, record_past=True)
        self.after: State = {}

    def scan(self, name: str, compute: scans.Compute, arguments: dict[str, Any]) -> Any:
        """Handle a call of a scan (`scans.Handler`): layers hand no state to that of Mamba 1."""
        if name == scans.MAMBA1:
            arguments = arguments | {STATE: self._before.get(("recurrent", 0))}
        return compute(arguments)

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_: Any,
    ) -> Tensor:
        """The inputs with those before them. A state of fewer tokens than the kernel has zeros
        before them, as in transformers' cache, so that the states of all nodes have one size."""
        before = self._before.get(("conv", state_idx))
        whole = conv_states if before is None else torch.cat([before, conv_states], dim=-1)
        size = conv_kernel_size or whole.shape[-1]
        self.after["conv", state_idx] = pad(whole[..., -size:], (max(0, size - whole.shape[-1]), 0))
        return whole

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> Tensor:
        """Note the state after the last token."""
        self.after["recurrent", state_idx] = scans.unrounded(recurrent_states)
        return recurrent_states
