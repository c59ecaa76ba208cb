"""One complete version of the weights, or a segment of it, in the memory of a process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from forge.core.named_tensor import NamedTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDeltas:
    """Deltas of tensors against an earlier version."""

    base_version: int = 0
    by_name: Mapping[str, bytes] = field(default_factory=dict)
    """Tensors without one travel whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldWeights:
    """One complete version."""

    tensors: Sequence[NamedTensor]
    """In the manifest's order."""
    manifest: bytes = b""
    """The manifest as encoded by its trainer; b"" by a trainer of an earlier release."""
    deltas: TensorDeltas = TensorDeltas()
    """The deltas as they arrived."""
    segment: range | None = None
    """Numbers of the tensors in the manifest if these are a segment of it; None: all."""

    @property
    def first(self) -> int:
        """Number of the first tensor in the manifest."""
        return self.segment.start if self.segment is not None else 0

    def tensor(self, number: int) -> NamedTensor | None:
        """The tensor of a number in the manifest; None if it is not here."""
        at = number - self.first
        return self.tensors[at] if 0 <= at < len(self.tensors) else None
