"""Copies of device tensors for publication and checkpoints."""

from __future__ import annotations

from functools import partial

import pytest
import torch

pytest.importorskip("structlog", reason="the packages of the services are not installed")

from services.trainer.checkpoint.shards import copy_shards
from services.trainer.checkpoint.shared_memory import SharedMemory, SpareMemory
from services.trainer.model.host_copies import finish_copies, host_copies, host_copy

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


def test_copies_are_rounded_complete_and_unchanged_by_the_next_step() -> None:
    """Pinned, in the published type, bit for bit as the processor rounds, strided tensors too."""
    torch.manual_seed(0)
    own = {"a": torch.randn(3000, 500).cuda(), "b": torch.randn(40, 60).cuda().T}
    expected = {name: one.cpu().to(torch.bfloat16) for name, one in own.items()}
    copies = dict(host_copies(own.items(), torch.bfloat16))
    for one in own.values():
        one.zero_()
    torch.cuda.synchronize()
    for name, copy in copies.items():
        assert copy.is_pinned() and copy.is_contiguous()
        assert torch.equal(copy, expected[name])


def test_shards_of_a_checkpoint_are_pinned_and_unchanged_by_the_next_step() -> None:
    """In their own type, bit for bit, and in the same memory at the next checkpoint."""
    torch.manual_seed(0)
    own = {"a": torch.randn(3000, 500).cuda(), "b": torch.randn(40, 60).cuda().T}
    expected = {name: one.cpu() for name, one in own.items()}
    spare: SpareMemory = []
    for _ in range(2):
        memory = SharedMemory(spare, pinned=True)
        shards = copy_shards(own, None, copy=partial(host_copy, empty=memory.empty))
        finish_copies(own["a"].device)
        del memory
        assert len(spare) == 1
    for one in own.values():
        one.zero_()
    torch.cuda.synchronize()
    assert {one.name for one in shards} == own.keys()
    for shard in shards:
        assert shard.data.is_pinned() and shard.data.is_contiguous()
        assert torch.equal(shard.data, expected[shard.name])
