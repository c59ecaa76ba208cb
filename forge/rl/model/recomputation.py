"""Activation checkpointing: layers are computed again in the backward pass.

The recomputation has the same context as the forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

from transformers.modeling_layers import GradientCheckpointingLayer

from forge.rl import numerics
from forge.rl.attention.tree_attention import current_tree, over_tree
from forge.rl.routing import current_routes, routed


def recompute_activations(model: Any, *, share: float = 1.0) -> None:
    """Recompute a share of the layers, spread evenly, in the backward pass instead of keeping their
    activations.

    transformers checkpoints only in training mode, so these layers are put into it, but not their
    modules: dropout stays off. Raises `ValueError` when the model cannot.
    """
    enable = getattr(model, "activation_checkpointing_enable", None)  # since transformers 5.20
    (enable or model.gradient_checkpointing_enable)(
        {"use_reentrant": False, "context_fn": recomputed}
    )
    layers = [one for one in model.modules() if isinstance(one, GradientCheckpointingLayer)]
    for index, layer in enumerate(layers):
        layer.training = int((index + 1) * share) > int(index * share)


def recomputed() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """`context_fn` of torch.utils.checkpoint: the recomputation has the routes, the tree, the
    attention and the widened parameters of the forward."""
    attention = numerics.own_attention(used=numerics.uses_own_attention())
    vectors = numerics.wide_vectors(numerics.widened_module())
    return nullcontext(), _nested(
        routed(current_routes()), over_tree(current_tree()), attention, vectors
    )


@contextmanager
def _nested(*contexts: AbstractContextManager[Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for one in contexts:
            stack.enter_context(one)
        yield
