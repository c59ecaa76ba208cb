"""The scan of Mamba 1 from a state: transformers' function begins with none.

The scan is linear in its state. So it begins with zeros, and the contribution of the given state is
added to each output and to the last state. The contribution decays by the sum of the steps so far.

Shapes: B rows, T tokens, C channels, N elements of a channel's state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

STATE = "initial_state"
"""Argument with the state to begin with, [B, C, N]; None: zeros."""


def from_state(scan: Callable[..., Any]) -> Callable[..., Any]:
    """The same scan with the argument `STATE`; gradients flow to the state, too."""

    def begun(
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        *,
        initial_state: Tensor | None = None,
        **named: Any,
    ) -> Any:
        if initial_state is None:
            return scan(hidden_states, dt, A, B, C, **named)
        gate, keeps_last = named.pop("z", None), named.pop("return_last_state", False)
        output_BCT, last_BCN = scan(hidden_states, dt, A, B, C, return_last_state=True, **named)
        decay_BCTN = _decay(dt, A, named)
        state_BCN = initial_state.to(decay_BCTN.dtype)
        left_BCTN = decay_BCTN * state_BCN[:, :, None]
        # No matrix product: autocast would round it.
        read_BCT = (left_BCTN * C.transpose(1, 2)[:, None]).sum(-1)
        output_BCT = output_BCT + read_BCT.to(output_BCT.dtype)
        if gate is not None:
            output_BCT = output_BCT * silu(gate)
        last_BCN = last_BCN + left_BCTN[:, :, -1]
        return (output_BCT, last_BCN) if keeps_last else output_BCT

    return begun


def _decay(dt_BCT: Tensor, rates_CN: Tensor, named: dict[str, Any]) -> Tensor:
    """[B, C, T, N]: what is left of a state after each token."""
    kind = torch.promote_types(dt_BCT.dtype, torch.float32)
    step_BCT = dt_BCT.to(kind)
    if named.get("delta_bias") is not None:
        step_BCT = step_BCT + named["delta_bias"].to(kind)[..., None]
    if named.get("delta_softplus"):
        step_BCT = softplus(step_BCT)
    return torch.exp(step_BCT.cumsum(-1)[..., None] * rates_CN.to(kind)[:, None])
