"""Moves of tokens within a tensor, to a lower place that may overlap the old one."""

from __future__ import annotations

import torch

from services.inference.engines.embedded.memory_shortage import attempt


def move_down(kv_HTD: torch.Tensor, *, source: int, target: int, tokens: int) -> None:
    """Move tokens [..., tokens, head_size] from the index `source` down to the index `target`.
    Without memory for a copy, it moves smaller parts in place."""
    distance = source - target
    if distance < tokens:
        copied = attempt(kv_HTD[..., source : source + tokens, :].clone, kv_HTD.device).result
        if copied is not None:
            kv_HTD[..., target : target + tokens, :] = copied
            return
    # Parts that overlap no part of the target, from the lowest one on.
    for start in range(0, tokens, distance):
        size = min(distance, tokens - start)
        part = kv_HTD[..., source + start : source + start + size, :]
        kv_HTD[..., target + start : target + start + size, :] = part
