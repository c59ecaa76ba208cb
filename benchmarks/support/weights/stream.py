"""A trainer's publisher and workers' followers in processes of their own.

The publisher, the follower, the RPCs and etcd are real; the engine takes weights and computes
nothing. Each process obeys a pipe and answers every order once it is done.
"""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import psutil
import uvloop
from prometheus_client import REGISTRY

from benchmarks.support.cpu import cpu_s
from forge.core.named_tensor import NamedTensor
from forge.runtime import weights
from forge.runtime.actors.actor_system import ActorSystem
from forge.runtime.coordination import Coordinator, Instance
from forge.runtime.files import host_memory
from forge.runtime.process.allocator import keep_freed_memory
from forge.runtime.process.service import ServiceContext
from forge.runtime.rpc.channel import Channels
from forge.runtime.rpc.server import RpcServer
from forge.runtime.security.credentials import Security
from forge.runtime.security.tokens import Keyring
from forge.runtime.settings.bulk_settings import BulkSettings
from forge.runtime.settings.weight_group_settings import WeightGroupSettings
from forge.runtime.telemetry import configure_logging
from forge.runtime.weights.bulk import BulkServer
from forge.runtime.weights.delta import DeltaEncoder
from forge.runtime.weights.group_process import GROUP_KEY, GroupProcess
from forge.v1 import inference_pb2_grpc as rpc
from services.inference.config import InferenceConfig
from services.inference.engines.base import Probe
from services.inference.worker.weights.follower import WeightFollower
from services.trainer.published.groups import WeightGroups
from services.trainer.published.local_copies import LocalCopies
from services.trainer.published.publisher import Publisher, Snapshot
from services.trainer.published.versions import PublishedVersions

GROUPS = WeightGroupSettings(backend="gloo", join_s=60.0, silence_s=60.0, limit_s=600.0)
LEASE_S = 30.0
_KEPT_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """An order to a process: a name and its arguments."""

    name: str
    arguments: tuple[Any, ...] = ()


class Started:
    """A process that obeys a pipe."""

    def __init__(self, body: Callable[..., None], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        self._process = context.Process(target=body, args=(theirs, *arguments), daemon=True)
        self._process.start()
        # Its end then ends `recv`.
        theirs.close()
        self.ready = self._ours.recv()
        """First message: it has started."""

    def order(self, name: str, *arguments: Any) -> Any:
        """Return the answer once the order is done."""
        self.begin(name, *arguments)
        return self.answer()

    def begin(self, name: str, *arguments: Any) -> None:
        """Send an order without waiting."""
        self._ours.send(Order(name=name, arguments=arguments))

    def answer(self) -> Any:
        """Wait for the answer to the oldest order without one."""
        return self._ours.recv()

    @property
    def answered(self) -> bool:
        """Whether `answer` returns at once."""
        return self._ours.poll()

    @property
    def pids(self) -> list[int]:
        """Its process id, then those of its children."""
        assert self._process.pid is not None
        children = psutil.Process(self._process.pid).children(recursive=True)
        return [self._process.pid, *(one.pid for one in children)]

    def cpu_s(self) -> float:
        """Return the CPU seconds of all its threads and children so far."""
        return cpu_s(self.pids[0])

    def end(self) -> None:
        """Kill it."""
        self._process.kill()
        self._process.join()


def security(tls: str = "") -> Security:
    """Return the credentials that all processes share; `tls`: a folder of `Certificates`."""
    ca, cert, key = (tls and f"{tls}/{name}.pem" for name in ("ca", "cert", "key"))
    return Security(
        Keyring.from_bytes(b"k" * 32),
        subject="benchmark",
        tls_ca=ca,
        tls_cert=cert,
        tls_key=key,
    )


def tensors(elements: Sequence[int], *, version: int) -> list[NamedTensor]:
    """Return random bfloat16 tensors with these numbers of elements; each version has other
    content."""
    rng = np.random.default_rng(version)
    made = []
    for number, items in enumerate(elements):
        data = memoryview(rng.bytes(items * 2))
        made.append(NamedTensor(name=f"t{number}", dtype="bfloat16", shape=(items,), data=data))
    return made


def publish_weights(
    pipe: Connection, etcd: str, cluster: str, way: str = "grpc", directory: str = ""
) -> None:
    """Be a trainer's publisher; `way` is memory, bulk, grpc, or with the name of a directory
    directory, bulk_tls or group.
    Orders: make(elements), publish(), sent_bytes(), members(), ready(), digest(), metric(name,
    labels)."""
    keep_freed_memory(_KEPT_BYTES)
    configure_logging("trainer", "trainer", level="warning", file="")
    uvloop.run(_publish(pipe, etcd, cluster, way, directory))


async def _publish(pipe: Connection, etcd: str, cluster: str, way: str, directory: str) -> None:
    coordinator = await Coordinator.connect(etcd, cluster=cluster)
    discovery = coordinator.discover("decode")

    async def workers() -> Sequence[Instance]:
        return discovery.instances if way in ("memory", "group") else ()

    tls = directory if way == "bulk_tls" else ""
    groups, process = None, GroupProcess(GROUPS, host="127.0.0.1", device="cpu")
    if way == "group":
        groups = WeightGroups(process, host="127.0.0.1", workers=workers)
        groups.start()
    copies = LocalCopies(
        workers=workers, directory=directory if way == "directory" else "", groups=groups
    )
    server = RpcServer(service="trainer", host="127.0.0.1", port=0, security=security(tls))
    versions = PublishedVersions(kept=2)
    sent: list[int] = []
    settings = BulkSettings(enabled=way.startswith("bulk"))
    bulk = BulkServer(security(tls), settings, host="127.0.0.1")
    servicer = weights.WeightServicer(
        lambda: versions.weights,
        deltas=DeltaEncoder(),
        bulk=bulk,
        join=groups.join if groups is not None else None,
        sent=sent.append,
    )
    server.add_service(
        rpc.add_WeightServiceServicer_to_server, servicer, full_name=weights.FULL_NAME
    )
    publisher = Publisher(
        coordinator, versions, source=await server.start(), floor=0, copies=copies
    )
    made: list[NamedTensor] = []

    async def obey(order: Order) -> Any:
        nonlocal made
        match order.name:
            case "make":
                (elements,) = order.arguments
                made = tensors(elements, version=publisher.version + 1)
                return None
            case "publish":
                snapshot, made = Snapshot(step=publisher.version, tensors=made), []
                return await publisher.publish(snapshot)
            case "members":
                return sum(one.metadata.get(GROUP_KEY) == "gloo" for one in discovery.instances)
            case "ready":
                return process.ready
            case "digest":
                return _digest(versions.weights)
            case "metric":
                return REGISTRY.get_sample_value(*order.arguments)
            case "end":
                return copies.keep(())
        return sum(sent)

    await _obey(pipe, obey)


async def _obey(pipe: Connection, obey: Callable[[Order], Awaitable[Any]]) -> None:
    pipe.send("ready")
    with suppress(EOFError):
        while True:
            order = await asyncio.to_thread(pipe.recv)
            pipe.send(await obey(order))


def follow_weights(
    pipe: Connection, etcd: str, cluster: str, name: str, directory: str = "", way: str = ""
) -> None:
    """Be a worker's follower; with the way group `directory` is memory of its own. Orders:
    until(version), ready(), digest(), metric(name, labels)."""
    keep_freed_memory(_KEPT_BYTES)
    configure_logging("inference", name, level="error", file="")
    if way == "group":
        # As on another host: it does not see the memory of the publisher.
        host_memory.DIRECTORY = Path(directory)
    uvloop.run(_follow(pipe, etcd, cluster, name, directory, way))


@dataclass(slots=True)
class _Engine:
    """Takes weights and computes nothing."""

    version: int = 0
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def load(
        self, loaded: Mapping[str, NamedTensor], *, version: int, probe: Probe | None = None
    ) -> None:
        async with self.changed:
            self.version = version
            self.changed.notify_all()

    async def until(self, version: int) -> None:
        async with self.changed:
            await self.changed.wait_for(lambda: self.version >= version)


def _digest(held: Mapping[int, weights.HeldWeights]) -> tuple[int, str]:
    """The newest version, and the SHA-256 of its data."""
    version = max(held)
    return version, weights.digest_of(one.data for one in held[version].tensors)


async def _follow(
    pipe: Connection, etcd: str, cluster: str, name: str, directory: str, way: str
) -> None:
    coordinator = await Coordinator.connect(etcd, cluster=cluster)
    tls = directory if cluster == "bulk_tls" else ""
    server = RpcServer(service="inference", host="127.0.0.1", port=0, security=security(tls))
    config = InferenceConfig(
        instance_id=name,
        weights_dir="" if tls or way == "group" else directory,
        weight_group=GROUPS if way == "group" else WeightGroupSettings(),
        weight_silence_s=60.0,
        lease_ttl_s=LEASE_S,
    )
    context = ServiceContext(
        config=config,
        security=security(tls),
        coordinator=coordinator,
        channels=Channels(security(tls)),
        actors=ActorSystem(name),
        server=server,
        ready=False,
    )
    engine = _Engine()
    follower = WeightFollower(context, cast(Any, engine), policy="default")
    # As workers do; with other ways they relay over gRPC here.
    relays = BulkSettings(enabled=way.startswith("bulk"))
    bulk = BulkServer(security(tls), relays, host="127.0.0.1")
    server.add_service(
        rpc.add_WeightServiceServicer_to_server,
        weights.WeightServicer(lambda: follower.weights, arriving=follower.relay, bulk=bulk),
        full_name=weights.FULL_NAME,
    )
    address = await server.start()
    context.set_listening(address)

    async def register() -> None:
        await context.until_ready()
        context.registration = await coordinator.register(
            "decode", name, address, metadata=context.metadata, ttl_s=LEASE_S
        )

    async def obey(order: Order) -> Any:
        match order.name:
            case "ready":
                return follower._group is not None and follower._group.process.ready
            case "digest":
                return _digest(follower.weights)
            case "metric":
                return REGISTRY.get_sample_value(*order.arguments)
        return await engine.until(order.arguments[0])

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(register())
        tasks.create_task(follower.run())
        tasks.create_task(_obey(pipe, obey))


class _Measured(Protocol):
    def cpu_s(self) -> float: ...


def cpu_of(processes: Sequence[_Measured], work: Callable[[], object]) -> float:
    """Return the CPU seconds that the processes spend on `work`."""
    before_s = sum(one.cpu_s() for one in processes)
    work()
    return sum(one.cpu_s() for one in processes) - before_s
