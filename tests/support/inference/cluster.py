"""Real router, prefill and decode processes, and a publisher of weights in the trainer's place."""

from __future__ import annotations

import asyncio
import itertools
import signal
from array import array
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from transformers import PretrainedConfig

from forge.core.named_tensor import NamedTensor
from forge.runtime.coordination import Coordinator, Instance
from forge.runtime.rpc.channel import Channels
from forge.runtime.rpc.server import RpcServer
from forge.runtime.security.credentials import Security
from forge.runtime.security.tokens import Keyring
from forge.runtime.serving_groups import starting_in
from forge.runtime.weights import (
    FULL_NAME,
    HeldWeights,
    TensorEntry,
    WeightAnnouncement,
    WeightHold,
    WeightManifest,
    WeightServicer,
    hold_key,
    manifest_key,
)
from forge.runtime.weights.delta import DeltaEncoder
from forge.v1 import drain_pb2, drain_pb2_grpc, inference_pb2, inference_pb2_grpc
from forge.v1.common_pb2 import SamplingParams
from services.inference import codec
from tests.support.inference.held_answers import HoldFile
from tests.support.runtime.etcd import EtcdServer
from tests.support.runtime.service_process import ServiceProcess, start_service
from tests.support.runtime.waiting import until

# A process takes seconds to start, and minutes where others take the processor.
START_S = 240.0
CALL_S = 600.0
LEASE_TTL_S = 10


class Publisher(WeightServicer):
    """Publishes weights as a trainer does: bytes over gRPC, the announcement in etcd."""

    def __init__(self, coordinator: Coordinator, server: RpcServer) -> None:
        super().__init__(lambda: self._versions, deltas=DeltaEncoder())
        self._coordinator = coordinator
        self._server = server
        self._versions: dict[int, HeldWeights] = {}
        self._announced: dict[int, WeightAnnouncement] = {}
        self._held_version = 0
        self.version = 0
        self.address = ""
        self._flows = asyncio.Event()
        self._flows.set()
        self.fetches = 0
        """How many whole sets of weights were asked of it."""

    async def start(self) -> None:
        self._server.add_service(
            inference_pb2_grpc.add_WeightServiceServicer_to_server, self, full_name=FULL_NAME
        )
        self.address = await self._server.start()

    async def publish(self, tensors: Mapping[str, NamedTensor], *, damaged: bool = False) -> int:
        """Announces them as the next version, which it returns; `damaged`: with wrong digests."""
        version = self.version + 1
        entries = [TensorEntry.of(tensor) for tensor in tensors.values()]
        if damaged:
            entries = [
                msgspec.structs.replace(one, digests=bytes(len(one.digests))) for one in entries
            ]
        manifest = WeightManifest(weight_version=version, step=version - 1, tensors=tuple(entries))
        encoded = manifest.encode()
        held = HeldWeights(tensors=tuple(tensors.values()), manifest=encoded)
        self._versions = {
            old: kept
            for old, kept in self._versions.items()
            if old in (self.version, self._held_version)
        } | {version: held}
        self.version = version
        announced = WeightAnnouncement.of(manifest, encoded, source=self.address)
        self._announced[version] = announced
        await self._store(manifest_key(), announced.encode())
        return version

    async def hold(self, version: int) -> None:
        """Holds a version, as a rollback does; 0: ends the hold."""
        self._held_version = version
        await self._store(hold_key(), WeightHold(base=self._announced.get(version)).encode())

    async def _store(self, key: str, value: bytes) -> None:
        current = await self._coordinator.get(key)
        await self._coordinator.compare_and_swap(
            key, value, expected_revision=current.mod_revision if current else 0
        )

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Meanwhile fetches begin and get nothing."""
        self._flows.clear()
        try:
            yield
        finally:
            self._flows.set()

    async def fetched(self, times: int) -> None:
        """Returns once whole sets of weights have been asked for so many times more."""
        wanted = self.fetches + times
        await until(lambda: self.fetches >= wanted)

    async def FetchWeights(
        self, request: inference_pb2.FetchWeightsRequest, context: Any
    ) -> AsyncIterator[inference_pb2.FetchWeightsResponse]:
        if request.weight_version == self.version:
            self.fetches += 1
            await self._flows.wait()
        async for response in super().FetchWeights(request, context):
            yield response


@dataclass(kw_only=True)
class Sample:
    """All that one Sample call gave."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish_reason: int = 0
    cached_tokens: int = 0
    engines: list[str] = field(default_factory=list)
    responses: int = 0
    last: inference_pb2.SampleResponse | None = None

    def add(self, response: inference_pb2.SampleResponse) -> None:
        tokens = codec.read_tokens(response.tokens)
        self.ids += tokens.ids
        self.logprobs += tokens.logprobs
        self.versions += tokens.versions
        self.responses += 1
        if response.finish_reason:
            self.finish_reason = response.finish_reason
            self.cached_tokens = response.cached_tokens
            self.engines = response.engine.split("+")
            self.last = response


class InferenceCluster:
    """Everything between a gateway and a trainer."""

    def __init__(
        self, folder: Path, model_path: Path, coordinator: Coordinator, etcd: EtcdServer, name: str
    ) -> None:
        self._folder = folder
        self._coordinator = coordinator
        key_file = folder / "key"
        self.security = security = Security(Keyring.generate(key_file), subject="test")
        self._base = [
            *("--etcd", etcd.endpoint),
            *("--cluster", name, "--key-file", str(key_file), "--model-path", str(model_path)),
            *(
                "--lease-ttl-s",
                str(LEASE_TTL_S),
                "--kv.block-tokens",
                "8",
                "--drain-s",
                str(START_S),
            ),
            *("--router.worker-wait-s", str(START_S)),
            *("--speculation.adaptive", "false"),
        ]
        self._etcd, self._name = etcd, name
        self._processes: dict[str, ServiceProcess] = {}
        self._killed: list[str] = []
        self._numbers = itertools.count()
        self.channels = Channels(security)
        self._server = RpcServer(service="trainer", host="127.0.0.1", port=0, security=security)
        self.publisher = Publisher(coordinator, self._server)

    def start(self, role: str, *settings: str) -> str:
        """Starts one process; returns its instance id, never used before."""
        name = f"{role}-{next(self._numbers)}"
        argv = [*self._base, "--role", role, "--instance-id", name, *settings]
        argv += ["--log-file", str(self._folder / f"{name}.log")]
        with (self._folder / f"{name}.stderr").open("ab") as stderr:
            own = "tests.support.inference.held_worker"
            module = "services.inference" if role == "router" else own
            self._processes[name] = start_service(module, *argv, stderr=stderr)
        return name

    @contextmanager
    def held_answers(self, tokens: int) -> Iterator[HoldFile]:
        """Answers of all workers stop at so many tokens, until they are let free. All before are
        sent."""
        file = HoldFile(self._folder / "hold")
        file.hold(tokens)
        try:
            yield file
        finally:
            file.free()

    async def workers(self, role: str, count: int) -> list[str]:
        """Names of exactly `count` registered workers of a role; starts and kills as needed. Those
        that were killed before are found no longer."""
        names = self.alive(role)
        for name in names[count:]:
            self.kill(name)
        await self.forget_killed()
        names = names[:count] + [self.start(role) for _ in range(count - len(names))]
        for name in names:
            await self.registered(role, name)
        return names

    def alive(self, role: str) -> list[str]:
        """Names of the processes of a role that were started and not killed."""
        return [name for name in self._processes if name.startswith(role)]

    async def registered(self, role: str, name: str, /, **metadata: str) -> Instance:
        """The instance once it has registered, with this metadata."""

        def fits(instance: Instance) -> bool:
            return instance.instance_id == name and metadata.items() <= instance.metadata.items()

        (instance,) = await self._coordinator.discover(role).wait(timeout_s=START_S, where=fits)
        return instance

    async def starting(self, count: int) -> None:
        """Returns once exactly `count` workers say that they fetch their first weights."""
        discovery = self._coordinator.discover(starting_in(""))
        await discovery.known()
        await until(lambda: len(discovery.instances) == count)

    async def status(self) -> inference_pb2.GetInferenceStatusResponse:
        stub = await self._router()
        return await stub.GetInferenceStatus(
            inference_pb2.GetInferenceStatusRequest(), timeout=CALL_S
        )

    async def call(self, ids: list[int], *, stream: bool = False, **sampling: Any) -> Any:
        """An open Sample call."""
        stub = await self._router()
        return stub.Sample(self.request(ids, stream=stream, **sampling), timeout=CALL_S)

    def request(
        self, ids: list[int], *, stream: bool = False, **sampling: Any
    ) -> inference_pb2.SampleRequest:
        """Greedy and short unless `sampling` says otherwise."""
        return inference_pb2.SampleRequest(
            request_id="test",
            prompt_ids=array("i", ids).tobytes(),
            sampling=SamplingParams(**{"temperature": 0.0, "max_tokens": 16, **sampling}),
            stream=stream,
        )

    def stub(self, router: Instance) -> inference_pb2_grpc.InferenceServiceAsyncStub:
        stub: Any = inference_pb2_grpc.InferenceServiceStub(self.channels.get(router.address))
        found: inference_pb2_grpc.InferenceServiceAsyncStub = stub
        return found

    async def sample(self, ids: list[int], **options: Any) -> Sample:
        sample = Sample()
        async for response in await self.call(ids, **options):
            sample.add(response)
        return sample

    def kill(self, name: str) -> None:
        """SIGKILL."""
        process = self._processes.pop(name)
        process.kill()
        process.wait()
        self._killed.append(name)

    async def forget_killed(self) -> None:
        """As when their TTL has passed: the router tries them no more."""
        if not self._killed:
            return
        for name in self._killed:
            await self.end_lease(name)

        async def forgotten() -> bool:
            workers = (await self.status()).workers
            return not any(worker.instance_id in self._killed for worker in workers)

        await until(forgotten)
        self._killed.clear()

    async def end_lease(self, name: str) -> None:
        """As when the TTL of a process that renews no more has passed."""
        await self._etcd.end_leases(self._name, name)

    async def drain(self, name: str, draining: bool) -> None:
        """Takes a decode worker out of service, or back, once the router knows."""
        instance = await self.registered("decode", name)
        stub: Any = drain_pb2_grpc.DrainServiceStub(self.channels.get(instance.address))
        answer = await stub.SetDraining(drain_pb2.SetDrainingRequest(draining=draining))
        assert answer.draining == draining

        async def known() -> bool:
            workers = (await self.status()).workers
            return any(w.instance_id == name and w.draining == draining for w in workers)

        await until(known)

    def terminate(self, name: str) -> None:
        """SIGTERM, without waiting."""
        self._processes[name].send_signal(signal.SIGTERM)

    def freeze(self, name: str) -> None:
        """SIGSTOP: it keeps its connections and answers nothing; `kill` ends it."""
        self._processes[name].send_signal(signal.SIGSTOP)

    def log_of(self, name: str) -> str:
        """What a process has logged."""
        return (self._folder / f"{name}.log").read_text()

    def exit_code(self, name: str) -> int:
        """Of a process that is ending."""
        return self._processes.pop(name).wait(timeout=START_S)

    async def stop(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()
        await self.channels.close()
        await self._server.stop(grace_s=0)

    async def sampling(self, *calls: asyncio.Task[Any]) -> list[str]:
        """The decode workers that are sampling right now; waits until there is one, or none of the
        calls is left that could make it sample."""
        busy: list[str] = []

        async def found() -> bool:
            left = [call for call in calls if not call.done()]
            workers = (await self.status()).workers
            busy[:] = [w.instance_id for w in workers if w.role != "prefill" and w.running]
            return bool(busy) or not left

        await until(found)
        return busy

    async def known_to_router(self, *names: str) -> None:
        """Returns once the router has these workers."""

        async def known() -> bool:
            workers = {worker.instance_id for worker in (await self.status()).workers}
            return workers.issuperset(names)

        await until(known)

    async def sampling_on(self, *names: str) -> None:
        """Returns once one of these workers is sampling."""

        async def found() -> bool:
            workers = (await self.status()).workers
            return any(worker.running for worker in workers if worker.instance_id in names)

        await until(found)

    async def idle(self) -> None:
        """Returns once no worker has anything to do."""

        async def is_idle() -> bool:
            return not any(worker.running for worker in (await self.status()).workers)

        await until(is_idle)

    async def _router(self) -> inference_pb2_grpc.InferenceServiceAsyncStub:
        (router, *_) = await self._coordinator.discover("router").wait(timeout_s=START_S)
        return self.stub(router)


@asynccontextmanager
async def inference_cluster(
    folder: Path, etcd: EtcdServer, name: str, *, model: PretrainedConfig
) -> AsyncIterator[InferenceCluster]:
    """A publisher, and the directory of a model without weights; a test starts its processes."""
    model.save_pretrained(folder / "model")
    coordinator = await Coordinator.connect(etcd.endpoint, cluster=name)
    made = InferenceCluster(folder, folder / "model", coordinator, etcd, name)
    try:
        await made.publisher.start()
        yield made
    finally:
        await made.stop()
        await coordinator.close()
