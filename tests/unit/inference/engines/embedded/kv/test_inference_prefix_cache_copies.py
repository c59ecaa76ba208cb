"""Copies between the prefix cache and sequences: their values, and the memory that they take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from forge.core.token_columns import int32_bytes
from services.inference.engines.embedded.kv.prefix_cache import KvCache
from services.inference.engines.embedded.kv.shape import KvShape

BLOCK, TOKENS = 4, 32
SHAPE = KvShape(
    layers=3, windowed=False, heads=2, head_size=8, dtype=torch.float32, device=torch.device("cpu")
)


class NewMemory(TorchDispatchMode):
    """Counts the bytes of tensors that share no memory with an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operation and note its result."""
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        given = {
            one.untyped_storage().data_ptr()
            for one in (*args, *kwargs.values())
            if isinstance(one, torch.Tensor)
        }
        if isinstance(found, torch.Tensor) and found.untyped_storage().data_ptr() not in given:
            self.nbytes += found.nbytes
        return found


def test_match_is_copied_without_a_second_copy() -> None:
    """The values go from the blocks to the sequence; only the numbers of the blocks are new
    memory, also for a part of a match and a row of a slab."""
    cache = KvCache(SHAPE, block_tokens=BLOCK, capacity_bytes=1 << 20, resumes=False)
    kv = torch.randn(3, 2, 2, TOKENS, 8)
    ids = int32_bytes(range(TOKENS))
    cache.store(ids, kv, routes=torch.empty((TOKENS, 0), dtype=torch.uint8))
    match = cache.match(ids, limit_tokens=TOKENS)
    out = torch.zeros(3, 2, 2, TOKENS + 5, 16)[..., ::2]
    with NewMemory() as memory:
        cache.read(match, out, start=BLOCK, end=TOKENS - BLOCK)
    copied = TOKENS - 2 * BLOCK
    assert torch.equal(out[:, :, :, :copied], kv[:, :, :, BLOCK : TOKENS - BLOCK])
    assert not out[:, :, :, copied:].any()
    assert memory.nbytes <= 8 * copied // BLOCK
