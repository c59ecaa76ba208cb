"""Devices that compute fast in bfloat16.

A CPU without instructions for bfloat16 converts each operand: on an AMD EPYC of 2021 a backward
pass of SmolLM2-135M took 25 times as long in bfloat16 as in float32.
"""

from __future__ import annotations

import torch

_BFLOAT16_INSTRUCTIONS = ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16")
"""Names in `torch.cpu.get_capabilities()`, on x86-64 and on Arm."""


def computes_bfloat16(device: torch.device) -> bool:
    """Whether matrix products in bfloat16 are no slower than in float32 on `device`."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if device.type == "cpu":
        capabilities = torch.cpu.get_capabilities()
        return any(capabilities.get(name) for name in _BFLOAT16_INSTRUCTIONS)
    return False
