"""The files in which workers find a published version, beside gRPC.

Shared memory is used while a worker of this host and user is in discovery, a directory if the
setting `weights_dir` names one. Without room a version travels by gRPC alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from pathlib import Path

from forge.core.named_tensor import NamedTensor
from forge.runtime.coordination import Instance
from forge.runtime.files import host_memory
from forge.runtime.telemetry import log
from forge.runtime.weights import DIRECTORY_WAY, MEMORY_KEY
from forge.runtime.weights.version_files import VersionFiles
from services.trainer.metrics import WEIGHT_FILES

Workers = Callable[[], Awaitable[Sequence[Instance]]]


class LocalWays:
    """The files of the versions that this trainer sends."""

    def __init__(self, *, workers: Workers, directory: str = "") -> None:
        """`workers` returns the workers in discovery; `directory`: the setting `weights_dir`."""
        self._workers = workers
        self._place = host_memory.place()
        self._memory = VersionFiles(host_memory.DIRECTORY, mapped=True)
        self._directory = VersionFiles(Path(directory), mapped=False) if directory else None

    async def put(
        self, version: int, manifest: str, tensors: Sequence[NamedTensor]
    ) -> tuple[Sequence[NamedTensor], tuple[str, ...]]:
        """Write the version whose manifest has this sha256. Returns its tensors, in shared memory
        if it is there, and the ways for the announcement."""
        ways = []
        if self._directory is not None and await _written(
            "directory", self._directory, version, manifest, tensors
        ):
            ways.append(DIRECTORY_WAY)
        if await self._has_neighbours():
            shared = await _written("memory", self._memory, version, manifest, tensors)
            if shared:
                ways.append(self._place)
            tensors = shared or tensors
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
    way: str, files: VersionFiles, version: int, manifest: str, tensors: Sequence[NamedTensor]
) -> Sequence[NamedTensor]:
    """The written tensors; none if it failed."""
    try:
        found = await asyncio.to_thread(files.write, version, manifest, tensors)
    except OSError as error:
        WEIGHT_FILES.labels(way, "failed").inc()
        log.warning("weights_not_shared", way=way, weight_version=version, error=str(error))
        return ()
    WEIGHT_FILES.labels(way, "written").inc()
    return found
