"""The layers of a transformers model, without the final norm before its head.

Owns finding that norm and the states before it. The head applies the norm only to the rows it
needs, so autograd holds nothing for the norm of the other tokens.

Shapes: L tokens of a pass, R logit rows, C hidden channels, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

from torch import Tensor, nn

from forge.core.errors import InvalidArgument
from forge.rl import numerics
from forge.rl.attention.tree_attention import over_tree


@dataclass(frozen=True, slots=True, kw_only=True)
class BackboneOutput:
    """Output of the layers for one pass."""

    states_LC: Tensor
    """States after the last layer."""
    norm: nn.Module | None
    """Norm between these states and the head; None if there is none."""
    normed_LC: Tensor | None
    """States after the norm, detached; None if not requested."""
    router_logits: Sequence[Tensor]
    """Router logits of a mixture of experts by layer; empty if not requested."""


class Backbone:
    """The backbone of one model."""

    def __init__(self, model: Any) -> None:
        self._model = model
        norms = [one for one in model.base_model.children() if "Norm" in type(one).__name__]
        self._norm: nn.Module | None = norms[-1] if norms else None

    def __call__(self, inputs: dict[str, Any], *, normed: bool) -> BackboneOutput:
        """One pass; `inputs` are keywords of the model's forward."""
        calls: list[tuple[Tensor, Tensor]] = []

        def watch(_: nn.Module, given: tuple[Tensor, ...], made: Tensor) -> None:
            calls.append((given[0], made))

        hook = self._norm.register_forward_hook(watch) if self._norm is not None else None
        try:
            with over_tree(inputs.get("tree")):
                output = self._model.base_model(**inputs)
        finally:
            if hook is not None:
                hook.remove()
        last_BLC = output.last_hidden_state
        # The final norm is the one that computed the output.
        norm = self._norm if calls and calls[-1][1] is last_BLC else None
        states_BLC = last_BLC if norm is None else calls[-1][0]
        return BackboneOutput(
            states_LC=states_BLC[0],
            norm=norm,
            normed_LC=last_BLC[0].detach() if normed else None,
            router_logits=getattr(output, "router_logits", None) or (),
        )

    def up_to_head(self, inputs: dict[str, Any]) -> BackboneOutput:
        """One pass of the model's own forward without its head: the states are the head's input,
        after the norm, and no logits are computed.

        Raises `InvalidArgument` for a model that does not call its head once, on all tokens.
        """
        calls: list[Tensor] = []
        head = self._model.get_output_embeddings()

        def record(states_BLC: Tensor) -> Tensor:
            calls.append(states_BLC)
            # Operations on logits, as a scale, then compute nothing and take no memory.
            shape = (*states_BLC.shape[:-1], len(head.weight))
            return states_BLC.new_empty(shape, device="meta")

        with numerics.own_attention(), numerics.with_forward(head, record):
            output = self._model(**inputs)
        if len(calls) != 1 or calls[0].shape[:2] != inputs["input_ids"].shape:
            raise InvalidArgument(
                f"{type(self._model).__name__} does not compute logits by its head alone"
            )
        return BackboneOutput(
            states_LC=calls[0][0],
            norm=None,
            normed_LC=calls[0][0].detach(),
            router_logits=getattr(output, "router_logits", None) or (),
        )

    def with_head(self, inputs: dict[str, Any], places_R: Tensor) -> tuple[BackboneOutput, Tensor]:
        """One pass with the model's own head: logits [R, V] of the tokens `places_R`. The states
        are after the norm."""
        keeps_logits = "logits_to_keep" in signature(self._model.forward).parameters
        kept = {"logits_to_keep": places_R} if keeps_logits else {}
        with numerics.own_attention():
            output = self._model(**inputs, **kept, output_hidden_states=True)
        logits_RV = output.logits[0] if kept else output.logits[0].index_select(0, places_R)
        states_LC = output.hidden_states[-1][0]
        backbone = BackboneOutput(
            states_LC=states_LC,
            norm=None,
            normed_LC=states_LC.detach(),
            router_logits=getattr(output, "router_logits", None) or (),
        )
        return backbone, logits_RV
