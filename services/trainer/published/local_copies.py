"""Copies of published versions in files, which workers of this host or directory read.

Owns the copies in shared memory, while a worker of this host and user is in discovery or groups
receive versions, and in the directory of the setting `weights_dir`. Without room workers fetch a
version by gRPC alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from forge.core.errors import ResourceExhausted
from forge.core.named_tensor import NamedTensor
from forge.runtime.coordination import Instance
from forge.runtime.files import host_memory
from forge.runtime.telemetry import log
from forge.runtime.weights import DIRECTORY_WAY, MEMORY_KEY
from forge.runtime.weights.version_files import (
    ALIGNED_BYTES,
    VersionFiles,
    starts_of,
    write_segment,
)
from services.trainer.metrics import WEIGHT_FILES
from services.trainer.published.segments import OtherRanks

Workers = Callable[[], Awaitable[Sequence[Instance]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rest:
    """The tensors of a version that other ranks hold."""

    ranks: OtherRanks
    places: Sequence[str]
    """Shared memory that each rank sees."""
    sizes: Sequence[int]
    """Bytes of all tensors of the version."""


class Groups(Protocol):
    """Sends versions to groups of workers (`groups`)."""

    way: str
    """Of announcements."""

    def offer(self, version: int, file: int) -> None:
        """Take a descriptor of the file with all tensors of a version, and close it later."""


class LocalCopies:
    """The copies of the versions that this trainer sends."""

    def __init__(self, *, workers: Workers, directory: str, groups: Groups | None = None) -> None:
        """`workers` returns the workers in discovery; `directory`: the setting `weights_dir`."""
        self._workers = workers
        self._groups = groups
        self._place = host_memory.place()
        self._memory = VersionFiles(host_memory.DIRECTORY, mapped=True)
        self._directory = VersionFiles(Path(directory), mapped=False) if directory else None

    async def put(
        self,
        version: int,
        manifest: str,
        tensors: Sequence[NamedTensor],
        rest: Rest | None = None,
    ) -> tuple[Sequence[NamedTensor], tuple[str, ...]]:
        """Write the version whose manifest has this sha256, together with the ranks that have the
        `rest` of its tensors. Returns its tensors, in shared memory if it is there, and the ways
        for the announcement. Raises `Unavailable` when a rank is lost."""
        ways = []
        if self._directory is not None:
            written = await _written("directory", self._directory, version, manifest, tensors, rest)
            # An empty one is written, too: rank 0 may have no tensor.
            if written is not None:
                ways.append(DIRECTORY_WAY)
        # Ranks of another host do not see this one's memory.
        here = rest is None or all(place == self._place for place in rest.places)
        if here and (self._groups is not None or await self._has_neighbours()):
            shared = await _written("memory", self._memory, version, manifest, tensors, rest)
            if shared is not None:
                ways.append(self._place)
                tensors = shared
                if self._groups is not None:
                    ways.append(self._groups.way)
                    self._groups.offer(version, self._memory.descriptor(version))
        return tensors, tuple(ways)

    def keep(self, versions: Collection[int]) -> None:
        """Remove the files of all other versions."""
        self._memory.keep(versions)
        if self._directory is not None:
            self._directory.keep(versions)

    async def _has_neighbours(self) -> bool:
        if not self._place:
            return False
        return any(one.metadata.get(MEMORY_KEY) == self._place for one in await self._workers())


async def _written(
    way: str,
    files: VersionFiles,
    version: int,
    manifest: str,
    tensors: Sequence[NamedTensor],
    rest: Rest | None,
) -> Sequence[NamedTensor] | None:
    """The written tensors; None if it failed."""
    try:
        if rest is None:
            found = await asyncio.to_thread(files.write, version, manifest, tensors)
        else:
            found = await _written_together(files, version, manifest, tensors, rest)
    except (OSError, ResourceExhausted) as error:
        WEIGHT_FILES.labels(way, "failed").inc()
        log.warning("weights_not_shared", way=way, weight_version=version, error=str(error))
        return None
    WEIGHT_FILES.labels(way, "written").inc()
    return found


async def _written_together(
    files: VersionFiles,
    version: int,
    manifest: str,
    tensors: Sequence[NamedTensor],
    rest: Rest,
) -> Sequence[NamedTensor]:
    """Raises `OSError`, and as `OtherRanks.write`."""
    unfinished = await asyncio.to_thread(files.begin, manifest, rest.sizes)
    try:
        starts = starts_of(rest.sizes)[: len(tensors)]
        kept = await asyncio.to_thread(
            write_segment, unfinished.path, tensors, starts, mapped=files.mapped
        )
        await rest.ranks.write(
            version, unfinished.path, aligned_bytes=ALIGNED_BYTES, mapped=files.mapped
        )
        files.complete(version, unfinished)
    except BaseException:
        files.abandon(unfinished)
        raise
    return kept
