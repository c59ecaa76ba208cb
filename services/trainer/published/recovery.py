"""A held version that this host's disk lacks, from a worker that serves it.

For a standby of another host that takes over during a hold: the files of the hold are on the host
of the earlier trainer. Owns the choice of workers; `files` stores the version.
"""

from __future__ import annotations

from collections.abc import Sequence

from forge.core.errors import ForgeError, Unavailable
from forge.runtime.coordination import Instance
from forge.runtime.telemetry import log
from forge.runtime.weights import HeldWeights, WeightAnnouncement
from forge.runtime.weights.assembly import WeightAssembly
from forge.runtime.weights.client import WeightClient

SILENCE_S = 15.0
"""Time without data after which the next worker is tried."""


class ServedVersions:
    """Fetches versions from the workers that serve them."""

    def __init__(self, client: WeightClient) -> None:
        self._client = client

    async def fetch(
        self, announced: WeightAnnouncement, workers: Sequence[Instance]
    ) -> HeldWeights:
        """Return the verified version. Raises `Unavailable` if no worker sends it."""
        version = announced.weight_version
        serving = [one for one in workers if one.metadata.get("weight_version") == str(version)]
        for worker in serving:
            try:
                return await self._fetch_from(worker.address, announced)
            except ForgeError as error:
                log.warning(
                    "weight_source_given_up",
                    source=worker.address,
                    weight_version=version,
                    error=str(error),
                )
        raise Unavailable(f"none of {len(serving)} workers with weights {version} sent them")

    async def _fetch_from(self, address: str, announced: WeightAnnouncement) -> HeldWeights:
        version = announced.weight_version
        encoded = await self._client.manifest(address, version)
        manifest = announced.open(encoded)
        names = [one.name for one in manifest.tensors]
        assembly = WeightAssembly(
            version, names, total_bytes=manifest.total_bytes, entries=manifest.tensors
        )
        await self._client.fetch(assembly, address, until=len(names))
        return HeldWeights(tensors=tuple(assembly.tensors.values()), manifest=encoded)
