"""The engine's decode step of Mamba 2."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers.models.mamba2 import modeling_mamba2

from services.inference.engines.embedded.recurrent.mamba2_step import mamba2_step

_B, _H, _G, _P, _N, _T = 3, 4, 2, 8, 16, 6


def _arguments(**own: Any) -> dict[str, Any]:
    """Those of one token; time step, decay and skip are expanded as by transformers' layers."""
    decay, skip, bias = (torch.rand(_H, dtype=torch.float64) for _ in range(3))
    return {
        "A": -decay[:, None, None].expand(-1, _P, _N),
        "D": skip[:, None].expand(-1, _P),
        "dt_bias": bias[:, None].expand(-1, _P),
        "dt_softplus": True,
        "z": None,
        **own,
    }


def _token() -> dict[str, torch.Tensor]:
    step = torch.randn(_B, _H, 1, dtype=torch.float64).expand(-1, -1, _P)
    values = torch.randn(_B, _H, _P, dtype=torch.float64)
    keys, reads = (torch.randn(_B, _G, _N, dtype=torch.float64) for _ in range(2))
    return {"hidden_states": values, "dt": step, "B": keys, "C": reads}


@pytest.mark.parametrize("limit", [(0.0, math.inf), (0.9, 1.1)])
def test_steps_are_those_of_transformers(limit: tuple[float, float]) -> None:
    """Outputs and states after several tokens equal the scan of chunks, which bounds the time step.
    States may lie in longer rows."""
    torch.manual_seed(0)
    fixed = _arguments()
    state = torch.zeros(_B, 2, _H, _P, _N, dtype=torch.float64)[:, 1]
    tokens = [_token() for _ in range(_T)]
    steps = [mamba2_step(fixed | one | {"state": state}, limit) for one in tokens]
    # Its casts are to float32.
    outputs, last = modeling_mamba2.mamba2_chunk_scan(
        torch.stack([one["hidden_states"] for one in tokens], dim=1),
        torch.stack([one["dt"][..., 0] for one in tokens], dim=1),
        fixed["A"][:, 0, 0],
        torch.stack([one["B"] for one in tokens], dim=1),
        torch.stack([one["C"] for one in tokens], dim=1),
        chunk_size=4,
        D=fixed["D"][:, 0],
        dt_bias=fixed["dt_bias"][:, 0],
        dt_softplus=True,
        dt_limit=limit,
        return_final_states=True,
    )
    assert (torch.stack(steps, dim=1) - outputs).abs().max() < 1e-4
    assert (state - last).abs().max() < 1e-4
