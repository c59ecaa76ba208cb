"""The version that this worker fetches, for other workers while it arrives.

Owns the wait of those workers for the next tensor. Not here: the order of sources
(`weight_sources`), the check of what arrived, which each worker does itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

from forge.core.errors import NotFound
from forge.core.named_tensor import NamedTensor
from services.inference.worker.weight_assembly import WeightAssembly

ANNOUNCEMENT_S = 5.0
"""Longest wait for a version that others already know of."""


class WeightRelay:
    """Yields the tensors of an assembly as they arrive."""

    def __init__(self) -> None:
        self._assembly: WeightAssembly | None = None
        self._changed = asyncio.Event()

    @contextmanager
    def fetch(self) -> Iterator[None]:
        """Around the fetch of one version; its end, good or bad, ends the relay."""
        try:
            yield
        finally:
            self._assembly = None
            self.progress()

    def show(self, assembly: WeightAssembly) -> None:
        """Relay this assembly, within `fetch`."""
        if assembly is not self._assembly:
            self._assembly = assembly
            self.progress()

    def progress(self) -> None:
        """Wake those who wait for a tensor."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def tensors(self, version: int, from_tensor: int) -> AsyncIterator[NamedTensor]:
        """Yield the tensors of a version from one on, in the manifest's order. Raises NotFound for
        a version that is not fetched here, and when its fetch fails."""
        assembly = await self._begun(version)
        at = from_tensor
        while at < len(assembly.names):
            changed = self._changed
            if at < len(assembly.tensors):
                yield assembly.tensors[assembly.names[at]]
                at += 1
            elif assembly is not self._assembly:
                raise NotFound(f"the fetch of weights {version} ended here: ask another source")
            else:
                await changed.wait()

    async def _begun(self, version: int) -> WeightAssembly:
        try:
            async with asyncio.timeout(ANNOUNCEMENT_S):
                while self._assembly is None or self._assembly.version < version:
                    await self._changed.wait()
        except TimeoutError:
            raise NotFound(f"weights {version} are neither held nor fetched here") from None
        if self._assembly.version != version:
            raise NotFound(f"weights {version} are neither held nor fetched here")
        return self._assembly
