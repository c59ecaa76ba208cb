"""The sources of a worker's weights."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

from forge.core.errors import Unavailable
from forge.runtime.serving_groups import starting_in
from forge.runtime.settings.bulk_settings import BulkSettings
from forge.runtime.settings.weight_group_settings import WeightGroupSettings
from forge.runtime.weights import hold_key
from services.inference.worker.weights.follower import WeightFollower
from tests.support.inference.weight_sources import SECURITY


class Peers:
    """Discovery that etcd has told nothing yet."""

    def __init__(self) -> None:
        self.instances: tuple[Any, ...] = ()
        self._known = asyncio.Event()

    def show(self, *addresses: str) -> None:
        self.instances = tuple(
            SimpleNamespace(address=address, instance_id=address, metadata={"weight_version": "1"})
            for address in addresses
        )
        self._known.set()

    async def known(self) -> None:
        await self._known.wait()


class Context:
    """Of a worker whose coordinator has the weights at once, and its peers when told."""

    def __init__(self) -> None:
        self.peers = {"prefill": Peers(), "decode": Peers(), starting_in(""): Peers()}
        self.asked: asyncio.Queue[str] = asyncio.Queue()
        self.config = SimpleNamespace(
            instance_id="self",
            serving_group="",
            weights_dir="",
            weight_silence_s=60.0,
            probe_error=0.0,
            probe_exact_error=0.0,
            lease_ttl_s=10,
            bulk=BulkSettings(),
            weight_group=WeightGroupSettings(),
        )
        self.security = SECURITY
        self.metadata: dict[str, str] = {}
        self.coordinator = self.channels = self

    async def until_listening(self) -> str:
        return "self:1"

    async def register(self, *entry: Any, **options: Any) -> Any:
        raise Unavailable("etcd is of no use here")

    def discover(self, kind: str) -> Peers:
        return self.peers[kind]

    async def follow(self, key: str) -> AsyncIterator[Any]:
        if key == hold_key():
            yield None
            await asyncio.Event().wait()
        manifest = {"weight_version": 1, "tensor_names": ["a"], "total_bytes": 1, "digest": ""}
        yield SimpleNamespace(value=json.dumps(manifest | {"source": "trainer:1"}).encode())
        await asyncio.Event().wait()

    async def announce(self) -> None:
        return

    def stub(self, make: Any, address: str) -> Any:
        self.asked.put_nowait(address)
        raise Unavailable(f"{address} is of no use here")


async def test_started_worker_fetches_weights_from_its_peers_first() -> None:
    """Weights announced before the peers are known wait for them; the trainer is asked if no peer
    has any."""
    context = Context()
    follower = WeightFollower(cast(Any, context), cast(Any, None), policy="default")
    following = asyncio.create_task(follower.run())
    for _ in range(10):
        await asyncio.sleep(0)
    context.peers["prefill"].show()
    context.peers[starting_in("")].show()
    context.peers["decode"].show("peer:1")
    assert [await context.asked.get() for _ in range(2)] == ["peer:1", "trainer:1"]
    following.cancel()
    await asyncio.wait({following})
