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
def test_a_cpu_has_bfloat16_only_by_instructions(
    monkeypatch: pytest.MonkeyPatch, capabilities: Mapping[str, bool], expected: bool
) -> None:
    """Emulation counts as not having it: it is many times slower than float32."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert computes_bfloat16(torch.device("cpu")) is expected


def test_an_unknown_device_is_not_trusted_with_it() -> None:
    """What is not known to be fast is not chosen by itself."""
    assert not computes_bfloat16(torch.device("meta"))
