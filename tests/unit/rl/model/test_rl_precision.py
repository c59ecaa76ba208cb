"""Which type a device computes in fast."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from forge.rl.model.precision import computes_bfloat16


@pytest.mark.parametrize(
    ("capabilities", "expected"),
    [
        ({"avx2": True, "avx512_f": True, "avx512_bf16": False}, False),
        ({"avx512_bf16": True}, True),
        ({"amx_bf16": True}, True),
        ({"neon": True, "bf16": True}, True),
        ({"neon": True, "bf16": False}, False),
    ],
)
def test_cpu_has_bfloat16_only_with_its_instructions(
    monkeypatch: pytest.MonkeyPatch, capabilities: Mapping[str, bool], expected: bool
) -> None:
    """Emulated bfloat16 is many times slower than float32."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert computes_bfloat16(torch.device("cpu")) is expected


def test_unknown_device_does_not_use_bfloat16() -> None:
    """Its speed is unknown."""
    assert not computes_bfloat16(torch.device("meta"))
