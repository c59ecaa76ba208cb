"""A worker's weight follower, and real servers that it fetches weights from."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import grpc
import msgspec

from forge.core.errors import NotFound
from forge.core.named_tensor import NamedTensor
from forge.runtime.concurrency.tasks import cancel_and_wait
from forge.runtime.rpc.channel import Channels
from forge.runtime.rpc.server import RpcServer
from forge.runtime.security.credentials import Security
from forge.runtime.security.tokens import Keyring
from forge.runtime.serving_groups import starting_in
from forge.runtime.settings.bulk_settings import BulkSettings
from forge.runtime.settings.weight_group_settings import WeightGroupSettings
from forge.runtime.weights import (
    FULL_NAME,
    HeldWeights,
    TensorEntry,
    WeightAnnouncement,
    WeightHold,
    WeightManifest,
    WeightServicer,
    hold_key,
    layout_of,
)
from forge.runtime.weights.bulk import BulkServer
from forge.v1 import inference_pb2 as pb
from forge.v1 import inference_pb2_grpc as rpc
from services.inference.engines.base import BrokenWeights, Probe
from services.inference.worker.weights.follower import WeightFollower
from tests.support.runtime.weight_responses import weight_responses

SECURITY = Security(Keyring.from_bytes(b"k" * 32), subject="test")

Weights = Mapping[str, bytes]


def tensors_of(weights: Weights) -> list[NamedTensor]:
    return [
        NamedTensor(name=name, dtype="uint8", shape=(len(data),), data=data)
        for name, data in weights.items()
    ]


def manifest_of(version: int, weights: Weights) -> bytes:
    """The streamed manifest."""
    tensors = tuple(map(TensorEntry.of, tensors_of(weights)))
    return WeightManifest(weight_version=version, step=version - 1, tensors=tensors).encode()


def announcement_of(version: int, weights: Weights, *, source: str) -> WeightAnnouncement:
    """As a trainer stores it in etcd."""
    encoded = manifest_of(version, weights)
    return WeightAnnouncement.of(WeightManifest.decode(encoded), encoded, source=source)


def earlier_manifest(
    version: int, weights: Weights, source: str, **overrides: Any
) -> dict[str, Any]:
    """As a trainer of an earlier release announces weights."""
    return {
        "weight_version": version,
        "tensor_names": list(weights),
        "total_bytes": sum(map(len, weights.values())),
        "digest": hashlib.sha256(b"".join(weights.values())).hexdigest(),
        "source": source,
        "layout": layout_of(tensors_of(weights)),
        **overrides,
    }


def _add_earlier(servicer: rpc.WeightServiceServicer, server: Any) -> None:
    """Register FetchWeights alone."""
    handler = grpc.unary_stream_rpc_method_handler(
        servicer.FetchWeights,
        request_deserializer=pb.FetchWeightsRequest.FromString,
        response_serializer=pb.FetchWeightsResponse.SerializeToString,
    )
    handlers = grpc.method_handlers_generic_handler(FULL_NAME, {"FetchWeights": handler})
    server.add_generic_rpc_handlers((handlers,))


class Source(rpc.WeightServiceServicer):
    """Serves weights over gRPC until a limit, then sends nothing and keeps the call open."""

    def __init__(
        self, *, hangs_after: int | None = None, pause_s: float = 0.0, earlier: bool = False
    ) -> None:
        """`hangs_after`: messages of a call before it hangs; `pause_s`: before each message;
        `earlier`: it has the RPC of an earlier release alone."""
        self._register = _add_earlier if earlier else rpc.add_WeightServiceServicer_to_server
        self.held: dict[int, Weights] = {}
        self.manifests: dict[int, Weights] = {}
        """Weights of the manifests, where the data differs."""
        self.requests: list[pb.FetchWeightsRequest] = []
        self.hung = asyncio.Event()
        self.go_on = asyncio.Event()
        """Ends the silence: the rest follows, for tensors of one message each."""
        self._hangs_after = hangs_after
        self._pause_s = pause_s
        self._server = RpcServer(service="test", host="127.0.0.1", port=0, security=SECURITY)

    async def start(self) -> str:
        self._server.add_service(self._register, self, full_name=FULL_NAME)
        return await self._server.start()

    async def stop(self) -> None:
        await self._server.stop(grace_s=0)

    async def FetchManifest(
        self, request: pb.FetchManifestRequest, context: Any
    ) -> AsyncIterator[pb.FetchManifestResponse]:
        if self._hangs_after == 0:
            self.requests.append(pb.FetchWeightsRequest(weight_version=request.weight_version))
            self.hung.set()
            await self.go_on.wait()
        weights = self.manifests.get(request.weight_version, self.held.get(request.weight_version))
        if weights is None:
            raise NotFound(f"weights {request.weight_version} are not here")
        encoded = manifest_of(request.weight_version, weights)
        held = {request.weight_version: HeldWeights(tensors=(), manifest=encoded)}
        async for response in WeightServicer(lambda: held).FetchManifest(request, context):
            yield response

    async def FetchWeights(
        self, request: pb.FetchWeightsRequest, context: Any
    ) -> AsyncIterator[pb.FetchWeightsResponse]:
        self.requests.append(request)
        if self._hangs_after != 0 and request.weight_version not in self.held:
            raise NotFound(f"weights {request.weight_version} are not here")
        sent = 0
        tensors = tensors_of(self.held.get(request.weight_version, {}))
        async for response in weight_responses(request, tensors):
            if sent == self._hangs_after:
                break
            await asyncio.sleep(self._pause_s)
            yield response
            sent += 1
        if sent == self._hangs_after:
            self.hung.set()
            await self.go_on.wait()
            tensors_left = tensors[sent:]
            async for response in weight_responses(
                pb.FetchWeightsRequest(slices=True), tensors_left
            ):
                yield response


@dataclass
class Peers:
    """Discovery of one kind."""

    instances: tuple[Any, ...] = ()

    async def known(self) -> None:
        return


@dataclass
class Engine:
    """Remembers what it was given, and refuses some versions."""

    loaded: dict[int, dict[str, bytes]] = field(default_factory=dict)
    refuses: set[int] = field(default_factory=set)
    lacks_memory: list[int] = field(default_factory=list)
    """Versions; each is without memory once."""

    async def load(
        self, tensors: Mapping[str, NamedTensor], *, version: int, probe: Probe | None = None
    ) -> None:
        if version in self.refuses:
            raise BrokenWeights(f"weights {version}: a has NaN")
        if version in self.lacks_memory:
            self.lacks_memory.remove(version)
            raise MemoryError
        self.loaded[version] = {name: bytes(one.data) for name, one in tensors.items()}


class Worker:
    """A follower with a fake coordinator and engine, and real channels."""

    def __init__(
        self,
        *,
        silence_s: float = 0.3,
        name: str = "self",
        known_hold: bool = True,
        weights_dir: str = "",
        engine: Engine | None = None,
        security: Security = SECURITY,
        bulk: BulkSettings | None = None,
    ) -> None:
        """`known_hold`: etcd has said that there is no hold."""
        self.engine = engine or Engine()
        self.metadata: dict[str, str] = {}
        self.channels = Channels(security)
        self.coordinator = self
        self.config = SimpleNamespace(
            instance_id=name,
            serving_group="",
            weights_dir=weights_dir,
            weight_silence_s=silence_s,
            probe_error=0.0,
            probe_exact_error=0.0,
            lease_ttl_s=10,
            bulk=bulk or BulkSettings(),
            weight_group=WeightGroupSettings(),
        )
        self.security = security
        self.announced: list[dict[str, str]] = []
        self._kinds = {"prefill": Peers(), "decode": Peers(), starting_in(""): Peers()}
        self._announcements: asyncio.Queue[bytes] = asyncio.Queue()
        self._holds: asyncio.Queue[bytes | None] = asyncio.Queue()
        if known_hold:
            self._holds.put_nowait(None)
        self._changed = asyncio.Condition()
        self._server: RpcServer | None = None
        self.follower = WeightFollower(cast(Any, self), cast(Any, self.engine), policy="default")
        # A stalled test machine is no firewall.
        self.follower._client.bulk._connect_s = 60.0
        self._run = asyncio.create_task(self.follower.run())

    def show(self, addresses: Sequence[str], *, version: int) -> None:
        """Peers that say they have a version."""
        metadata = {"weight_version": str(version)}
        self._kinds["decode"].instances = tuple(
            SimpleNamespace(address=address, instance_id=address, metadata=metadata)
            for address in addresses
        )

    def meet(self, peers: Mapping[str, str]) -> None:
        """Peers by name, at these addresses, without a version yet."""
        self._kinds["decode"].instances = tuple(
            SimpleNamespace(address=address, instance_id=name, metadata={})
            for name, address in peers.items()
        )

    def publish(
        self, version: int, weights: Weights, *, source: str, ways: tuple[str, ...] = ()
    ) -> WeightAnnouncement:
        """Announce a version."""
        announced = announcement_of(version, weights, source=source)
        announced = msgspec.structs.replace(announced, ways=ways)
        self._announcements.put_nowait(announced.encode())
        return announced

    def publish_earlier(
        self, version: int, weights: Weights, *, source: str, **overrides: Any
    ) -> None:
        """Announce a version as a trainer of an earlier release does."""
        announced = earlier_manifest(version, weights, source, **overrides)
        self._announcements.put_nowait(json.dumps(announced).encode())

    def discover(self, kind: str) -> Peers:
        return self._kinds[kind]

    async def until_listening(self) -> str:
        return ""

    async def register(self, *entry: Any, **options: Any) -> SimpleNamespace:
        """Discovery is what a test writes."""

        async def close() -> None: ...

        return SimpleNamespace(close=close)

    def hold(self, hold: WeightHold) -> None:
        """Put a hold into etcd."""
        self._holds.put_nowait(hold.encode())

    async def follow(self, key: str) -> AsyncIterator[Any]:
        values: Any = self._holds if key == hold_key() else self._announcements
        while True:
            value = await values.get()
            yield value and SimpleNamespace(value=value)

    def set_ready(self) -> None:
        return

    async def announce(self) -> None:
        async with self._changed:
            self.announced.append(dict(self.metadata))
            self._changed.notify_all()

    async def until_announced(self, fits: Callable[[dict[str, str]], bool]) -> dict[str, str]:
        """The first metadata announced that fits."""
        async with self._changed:
            await self._changed.wait_for(lambda: any(map(fits, self.announced)))
        return next(filter(fits, self.announced))

    async def until_serving(self, version: int) -> dict[str, bytes]:
        """The tensors of a version, once the engine has them."""
        await self.until_announced(lambda metadata: metadata.get("weight_version") == str(version))
        return self.engine.loaded[version]

    async def serve(self) -> str:
        """Serve its weights to other workers, as a worker does; returns the address."""
        self._server = RpcServer(service="test", host="127.0.0.1", port=0, security=SECURITY)
        self._bulk = BulkServer(SECURITY, self.config.bulk, host="127.0.0.1")
        self._server.add_service(
            rpc.add_WeightServiceServicer_to_server,
            WeightServicer(
                lambda: self.follower.weights, arriving=self.follower.relay, bulk=self._bulk
            ),
            full_name=FULL_NAME,
        )
        return await self._server.start()

    async def stop(self) -> None:
        await cancel_and_wait(self._run)
        if self._server is not None:
            await self._server.stop(grace_s=0)
            self._bulk.close()
        await self.channels.close()
