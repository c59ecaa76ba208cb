"""A sharded world of one rank over NCCL. Several ranks need several devices."""

from __future__ import annotations

import pytest
import torch

from tests.support.rl.torchrun import torchrun

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


def test_sharded_world_of_one_takes_the_same_steps() -> None:
    """FSDP2 with NCCL: two steps in fp32 equal unsharded ones, in bf16 up to the rounding of
    gradients of norms; shards that are saved are read back bit for bit."""
    errors = torchrun(1, "tests.support.rl.device_world", timeout_s=240)
    assert errors.pop("checkpoint") == 0.0
    fp32 = {name: error for name, error in errors.items() if name.startswith("fp32")}
    assert fp32 and max(fp32.values()) <= 1e-4, errors
    assert max(errors.values()) <= 0.01, errors
