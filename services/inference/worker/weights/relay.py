"""The version that this worker fetches, for other workers while it arrives.

Owns the wait of those workers for the next slice. Not here: the order of sources
(`sources`), the check of what arrived, which each worker does itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

from forge.core.errors import NotFound
from forge.runtime.weights import BULK_BYTES, GROUP_PARTS, SLICE_BYTES, Part
from forge.runtime.weights.assembly import WeightAssembly

ANNOUNCEMENT_S = 5.0
"""Longest wait for a version that others already know of."""


class WeightRelay:
    """Yields the slices of an assembly as they arrive."""

    def __init__(self) -> None:
        self._assembly: WeightAssembly | None = None
        self._manifest = b""
        self._version = 0
        """Version of the running fetch."""
        self._changed = asyncio.Event()

    @contextmanager
    def fetch(self, version: int) -> Iterator[None]:
        """Around the fetch of one version; its end, good or bad, ends the relay."""
        self._version = version
        try:
            yield
        finally:
            self._assembly, self._version = None, 0
            self.progress()

    def fetches(self, version: int) -> bool:
        """Whether this version is fetched here now."""
        return self._version == version

    def show(self, assembly: WeightAssembly, manifest: bytes) -> None:
        """Relay this assembly, within `fetch`."""
        if assembly is not self._assembly:
            self._assembly, self._manifest = assembly, manifest
            self.progress()

    def progress(self) -> None:
        """Wake the readers that wait for data."""
        self._changed.set()
        self._changed = asyncio.Event()

    def changed(self) -> Coroutine[Any, Any, object]:
        """Return the wait for data, or for the end of the relay, from this call on."""
        # Not an async method: as a task it would miss what changes before its first step.
        return self._changed.wait()

    async def manifest(self, version: int) -> bytes:
        """Return the manifest of a version that is fetched here. Raises `NotFound`."""
        await self._begun(version)
        return self._manifest

    async def parts(
        self,
        version: int,
        from_tensor: int,
        from_byte: int,
        *,
        base_version: int,
        most_bytes: int = SLICE_BYTES,
    ) -> AsyncIterator[list[Part]]:
        """Yield the slices of a version from a byte of a tensor on, in the manifest's order. Raises
        NotFound for a version that is not fetched here, and when its fetch fails."""
        assembly = await self._begun(version)
        in_delta = False
        while from_tensor < len(assembly.names):
            changed = self._changed
            ready = assembly.ready(
                from_tensor,
                from_byte,
                base_version=base_version,
                in_delta=in_delta,
                slice_bytes=min(most_bytes, BULK_BYTES),
            )
            group = _group(ready, most_bytes)
            if group:
                last = group[-1]
                from_tensor = assembly.names.index(last.tensor.name, from_tensor)
                from_byte, in_delta = last.start + len(last.data), last.base_version > 0
                if from_byte == last.whole_bytes:
                    from_tensor, from_byte, in_delta = from_tensor + 1, 0, False
                yield group
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


def _group(ready: Iterator[Part], most_bytes: int) -> list[Part]:
    """The first slices, together at most `most_bytes`."""
    group: list[Part] = []
    group_bytes = 0
    for part in ready:
        group_bytes += len(part.data)
        if group and (group_bytes > most_bytes or len(group) == GROUP_PARTS):
            break
        group.append(part)
    return group
