"""A version of the weights during its fetch: an optional part of the contract of engines.

An engine with `load_arriving` may load the first tensors while the last ones are on their way.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from forge.core.named_tensor import HubPart, NamedTensor, hub_ranges
from services.inference.engines.base import Engine, Probe


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """Type, shape and size of a tensor whose data has not arrived."""

    dtype: str
    """As torch names it, without `torch.`."""
    shape: tuple[int, ...]
    size_bytes: int
    hub: tuple[HubPart, ...] = ()
    """See `NamedTensor`."""

    def in_hub_names(self) -> Iterator[tuple[str, Form]]:
        """Yield name and form of its tensors on the hub, in the order of `NamedTensor`."""
        item_bytes = self.size_bytes // max(1, math.prod(self.shape))
        for name, shape, place in hub_ranges(self.hub, item_bytes=item_bytes):
            size_bytes = place.stop - place.start
            yield name, Form(dtype=self.dtype, shape=shape, size_bytes=size_bytes)


class Arriving(Protocol):
    """The tensors of one version, each verified."""

    @property
    def forms(self) -> Mapping[str, Form]:
        """All tensors by name, in the order of their arrival."""

    def tensors(self) -> AsyncGenerator[NamedTensor]:
        """Yield each tensor once it is complete. Raises the error of a fetch that fails."""

    async def whole(self) -> Mapping[str, NamedTensor]:
        """Wait for all tensors. Raises the error of a fetch that fails."""

    def keep(self) -> None:
        """From now on finish the fetch even if newer weights are announced: the engine is about
        to change. Raises if the fetch already gave way to newer weights."""


class ArrivingEngine(Engine, Protocol):
    """An engine that loads weights during their fetch."""

    async def load_arriving(
        self, arriving: Arriving, *, version: int, probe: Probe | None = None
    ) -> None:
        """Load a version like `load`. A fetch that fails in the middle changes nothing."""
