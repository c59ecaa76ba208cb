"""A decode step of Mamba 2 on a CPU.

transformers computes the decay of a head once for each of its channels and states, and allocates
the new states several times. Here a head has one decay, and the states change in place.

Shapes: B sequences, H heads, G groups of heads, P channels of a head, N states of a channel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import softplus

NAME = "mamba2_selective_state_update"


def mamba2_step(arguments: dict[str, Any], limit: tuple[float, float]) -> torch.Tensor:
    """The outputs [B, H, P] of one token of each sequence; changes `state` in place, and computes
    in its type. `limit` bounds the time step, as in the scan of chunks. Other arguments are those
    of transformers' function: time step, its bias, decay and skip are the same for all channels of
    a head."""
    state_BHPN: torch.Tensor = arguments["state"]
    kind, (heads, channels, states) = state_BHPN.dtype, state_BHPN.shape[1:]
    values_BHP = arguments["hidden_states"].to(kind)
    step_BH = arguments["dt"][..., 0].to(kind) + arguments["dt_bias"][:, 0].to(kind)
    step_BH = softplus(step_BH).clamp(*limit)
    decay_BH = torch.exp(step_BH * arguments["A"][:, 0, 0].to(kind))
    keys_BHN, reads_BHN = (
        one.to(kind).repeat_interleave(heads // one.shape[1], dim=1)
        for one in (arguments["B"], arguments["C"])
    )
    with torch.autocast("cpu", enabled=False):
        state_BHPN.mul_(decay_BH[..., None, None])
        state_BHPN.addcmul_((step_BH[..., None] * values_BHP)[..., None], keys_BHN[:, :, None])
        # A row of states may lie between those of other layers: rows of a batch are not adjacent.
        found_bP1 = torch.bmm(
            state_BHPN.reshape(-1, channels, states), reads_BHN.reshape(-1, states, 1)
        )
    found_BHP = found_bP1.view(-1, heads, channels)
    found_BHP = torch.addcmul(found_BHP, values_BHP, arguments["D"][:, :1].to(kind))
    return found_BHP.to(arguments["hidden_states"].dtype)
