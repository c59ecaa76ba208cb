"""Versions that the trainer has put into files which this worker can open."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

from forge.core.errors import DataLoss
from forge.core.named_tensor import NamedTensor
from forge.runtime.files import host_memory
from forge.runtime.telemetry import log
from forge.runtime.weights import DIRECTORY_WAY, WeightAnnouncement, WeightManifest
from forge.runtime.weights.version_files import read_version
from services.inference.worker.metrics import WEIGHT_FILES_REFUSED


class LocalWeights:
    """Shared memory of the host, then the shared directory."""

    def __init__(self, *, directory: str) -> None:
        """`directory`: the setting `weights_dir`."""
        self.place = host_memory.place()
        """Name of the memory that this worker shares; "" without."""
        self._directory = directory

    async def read(
        self, announced: WeightAnnouncement, manifest: WeightManifest
    ) -> tuple[list[NamedTensor], str] | None:
        """The verified tensors and the name of their way; None if no file has them."""
        for way, directory in self._ways(announced):
            try:
                tensors = await asyncio.to_thread(
                    read_version,
                    directory,
                    announced.manifest,
                    manifest.tensors,
                    mapped=way == "memory",
                )
            except (OSError, DataLoss) as error:
                WEIGHT_FILES_REFUSED.labels(way).inc()
                log.warning(
                    "weight_file_refused",
                    way=way,
                    weight_version=announced.weight_version,
                    error=str(error),
                )
            else:
                return tensors, way
        return None

    def _ways(self, announced: WeightAnnouncement) -> Iterator[tuple[str, Path]]:
        if self.place and self.place in announced.ways:
            yield "memory", host_memory.DIRECTORY
        if self._directory and DIRECTORY_WAY in announced.ways:
            yield "directory", Path(self._directory)
