"""The state of the random numbers that a step uses: torch's on the host and on the device."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

HOST = "torch_rng"
DEVICE = "cuda_rng"


def random_state(device: torch.device) -> dict[str, Tensor]:
    """The present state, in host memory; of the device only if it is a GPU."""
    state = {HOST: torch.get_rng_state()}
    if device.type == "cuda":
        state[DEVICE] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: Mapping[str, Tensor], device: torch.device) -> None:
    """Continue from `random_state()`, which may be that of another kind of device."""
    torch.set_rng_state(state[HOST])
    if device.type == "cuda" and DEVICE in state:
        torch.cuda.set_rng_state(state[DEVICE], device)
