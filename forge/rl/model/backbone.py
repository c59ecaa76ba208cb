"""The layers of a transformers model, without the norm that its head begins with.

Owns finding that norm, and the states before it. A head that applies the norm itself, to the rows
it needs, spares the norm of all other tokens what autograd would hold for it.

Shapes: L tokens of a pass, R logit rows, C hidden channels, V vocabulary.
"""
# ruff: noqa: N815 -- shape suffixes are names here

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class TrunkOutput:
    """What the layers of a model made of a pass."""

    states_LC: Tensor
    """After the last layer."""
    norm: nn.Module | None
    """What comes between them and the head; None: nothing does."""
    normed_LC: Tensor | None
    """Behind the norm, detached; None if not asked for."""
    router_logits: Sequence[Tensor]
    """Of a mixture of experts, layer by layer; empty if not asked for."""


class Trunk:
    """Of one model."""

    def __init__(self, model: Any) -> None:
        self._model = model
        norms = [one for one in model.base_model.children() if "Norm" in type(one).__name__]
        self._norm: nn.Module | None = norms[-1] if norms else None

    def __call__(self, inputs: dict[str, Any], *, normed: bool) -> TrunkOutput:
        """One pass, `inputs` being keywords of the model's forward."""
        calls: list[tuple[Tensor, Tensor]] = []

        def watch(_: nn.Module, given: tuple[Tensor, ...], made: Tensor) -> None:
            calls.append((given[0], made))

        hook = self._norm.register_forward_hook(watch) if self._norm is not None else None
        try:
            output = self._model.base_model(**inputs)
        finally:
            if hook is not None:
                hook.remove()
        last_BLC = output.last_hidden_state
        # A norm that made anything but the output is not the one before the head.
        norm = self._norm if calls and calls[-1][1] is last_BLC else None
        states_BLC = last_BLC if norm is None else calls[-1][0]
        return TrunkOutput(
            states_LC=states_BLC[0],
            norm=norm,
            normed_LC=last_BLC[0].detach() if normed else None,
            router_logits=getattr(output, "router_logits", None) or (),
        )

    def with_head(
        self, inputs: dict[str, Any], places_R: Tensor, *, states: bool
    ) -> tuple[TrunkOutput, Tensor]:
        """The same with the model's own head: logits [R, V] of those tokens. Without `states` there
        are none, and with them they are behind the norm."""
        keeps_logits = "logits_to_keep" in signature(self._model.forward).parameters
        kept = {"logits_to_keep": places_R} if keeps_logits else {}
        output = self._model(**inputs, **kept, output_hidden_states=states)
        logits_RV = output.logits[0] if kept else output.logits[0].index_select(0, places_R)
        states_LC = output.hidden_states[-1][0] if states else output.logits.new_empty(0, 0)
        trunk = TrunkOutput(
            states_LC=states_LC,
            norm=None,
            normed_LC=states_LC.detach(),
            router_logits=getattr(output, "router_logits", None) or (),
        )
        return trunk, logits_RV
