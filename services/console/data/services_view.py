"""The services: registrations, health, versions, engines, GPUs, queues, and pool shards."""

from __future__ import annotations

import asyncio
from typing import Any

from forge.cli.status.system_state import Service, read_state
from forge.client.stored.pool import PoolReader
from forge.core.errors import ForgeError
from forge.runtime.coordination import Coordinator
from forge.runtime.rpc.channel import Channels
from forge.v1 import inference_pb2, pool_pb2

GPUS_KEY = "gpus"


class ServicesView:
    """Reads every service."""

    def __init__(
        self, coordinator: Coordinator, channels: Channels, reader: PoolReader, *, cluster: str
    ) -> None:
        self._coordinator = coordinator
        self._channels = channels
        self._reader = reader
        self._cluster = cluster

    async def read(self) -> dict[str, Any]:
        """The state as plain data. Raises `Unavailable` without etcd."""
        state, shards = await asyncio.gather(
            read_state(self._coordinator, self._channels, cluster=self._cluster), self._shards()
        )
        workers = {}
        if isinstance(state.inference, inference_pb2.GetInferenceStatusResponse):
            workers = {one.instance_id: worker_row(one) for one in state.inference.workers}
        return {
            "services": [
                service_row(one) | workers.get(one.instance, {}) for one in state.services
            ],
            "missing": state.missing,
            "problems": list(state.problems()),
            "shards": shards,
        }

    async def _shards(self) -> list[dict[str, Any]]:
        try:
            names = await self._reader.shards()
            stats = await asyncio.gather(*(self._reader.sizes(shard) for shard in names))
        except ForgeError:
            # The pools in the list of services say why.
            return []
        return [shard_row(one, self._reader.copies_in_sync(one.pool_shard)) for one in stats]


def service_row(one: Service) -> dict[str, Any]:
    """One process."""
    metadata = dict(one.metadata)
    gpus = [gpu for gpu in metadata.pop(GPUS_KEY, "").split("; ") if gpu]
    return {
        "kind": one.kind,
        "instance": one.instance,
        "address": one.address,
        "role": one.role,
        "state": one.state,
        "error": one.error,
        "version": one.version,
        "gpus": gpus,
        "metadata": metadata,
    }


def worker_row(one: inference_pb2.WorkerStatus) -> dict[str, Any]:
    """The load of an engine, as the router knows it."""
    prompt = one.computed_tokens + one.cached_tokens
    return {
        "weight_version": one.weight_version,
        "running": one.running,
        "queued": one.queued,
        "cached_share": one.cached_tokens / prompt if prompt else None,
    }


def shard_row(one: pool_pb2.GetPoolStatsResponse, copies: int) -> dict[str, Any]:
    """The sizes of a pool shard."""
    names = ("groups", "trajectories", "turns", "used_bytes", "live_bytes", "disk_free_bytes")
    return {"shard": one.pool_shard, "copies": copies} | {
        name: getattr(one, name) for name in names
    }
