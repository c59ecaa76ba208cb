"""Settings of groups that receive weights by torch.distributed, equal at the trainer and at
workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightGroupSettings:
    """Groups of workers that receive a version together, by torch.distributed."""

    backend: Literal["off", "gloo", "nccl"] = "off"
    """Send and receive new versions by a broadcast: gloo (host memory, TCP) or nccl (GPUs); off: by
    the other ways alone. The data is not encrypted: beyond loopback it needs insecure = true."""
    join_s: Annotated[float, Meta(gt=0, le=600)] = 2.0
    """Time from the first worker that joins a group for the others to join it."""
    silence_s: Annotated[float, Meta(gt=0, le=3600)] = 15.0
    """Longest time without data; then a member leaves the group and fetches the missing tensors."""
    limit_s: Annotated[float, Meta(gt=0, le=86_400)] = 60.0
    """Longest time of a broadcast; then the members fetch the missing tensors."""
