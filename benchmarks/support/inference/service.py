"""Router and workers as real processes, asked over the kept stream of a gateway.

Requests that are made at once travel in one message, as a gateway sends them. Owns the processes
and the stream. The CPU time of the caller and of etcd is not counted.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.support.cpu import cpu_s
from benchmarks.support.processes import ended
from forge.core.errors import ForgeError
from forge.core.token_columns import int32_bytes
from forge.runtime.concurrency.futures import settle
from forge.runtime.coordination import Coordinator
from forge.runtime.process.child_processes import dying_with_parent
from forge.runtime.rpc.channel import Channels
from forge.runtime.security.credentials import Security
from forge.runtime.security.tokens import Keyring
from forge.runtime.serving_groups import kind_in
from forge.v1 import inference_pb2 as pb
from forge.v1 import inference_pb2_grpc as rpc
from forge.v1.common_pb2 import SamplingParams
from services.gateway.router.router_stream import RouterStream
from services.inference import codec
from tests.support.runtime.etcd import EtcdServer

CLUSTER, GROUP = "benchmark", "bench"
START_S = 300.0
REQUEST_S = 3600.0


@dataclass(slots=True)
class Answer:
    """Sampled tokens, with their log-probs."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class _Receiver:
    """Receives one answer: a `CallReceiver`."""

    def __init__(self) -> None:
        self.answer = Answer()
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def on_response(self, response: pb.SampleResponse) -> None:
        tokens = codec.read_tokens(response.tokens)
        self.answer.ids += tokens.ids
        self.answer.logprobs += tokens.logprobs

    def on_end(self, error: ForgeError | None) -> None:
        settle(self.done, error)


class Service:
    """A router and its workers."""

    def __init__(
        self,
        model: Path,
        dtype: str,
        *,
        roles: tuple[str, ...],
        cache_mib: int,
        engine: str = "embedded",
        python: str = sys.executable,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`python` runs the workers; `environment`: variables of all processes besides this
        one's."""
        self._settings = ["--model-path", str(model), "--dtype", dtype]
        self._settings += ["--kv.cache-mib", str(cache_mib)]
        self._roles = roles
        self._engine = engine
        self._python = python
        self._environment = os.environ | (environment or {})
        self._undo = AsyncExitStack()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        """By role."""
        self._calls = itertools.count(1)

    async def start(self) -> None:
        """Start all processes; return once the workers serve."""
        folder = Path(self._undo.enter_context(tempfile.TemporaryDirectory()))
        etcd = EtcdServer(folder / "etcd")
        etcd.start()
        self._undo.callback(etcd.stop)
        keyring = Keyring.generate(folder / "key")
        flags = ["--etcd", etcd.endpoint, "--cluster", CLUSTER, "--lease-ttl-s", "60"]
        flags += ["--key-file", str(folder / "key"), "--serving-group", GROUP, *self._settings]
        coordinator = await Coordinator.connect(etcd.endpoint, cluster=CLUSTER)
        for role in (*self._roles, "router"):
            self._start(role, folder, flags)
            kind = kind_in(GROUP, "decode" if role == "both" else role)
            (instance,) = await coordinator.discover(kind).wait(timeout_s=START_S)
        await coordinator.close()
        channels = Channels(Security(keyring, subject="benchmark"))
        stub: Any = rpc.InferenceServiceStub(channels.get(instance.address))
        self._stream = RouterStream(stub.SampleStream(), peer=instance.instance_id)

    def _start(self, role: str, folder: Path, flags: list[str]) -> None:
        python = sys.executable if role == "router" else self._python
        argv = [python, "-m", "services.inference", *flags, "--role", role]
        argv += ["--instance-id", role, "--log-level", "warning"]
        argv += ["--log-file", str(folder / f"{role}.log")]
        if role != "router":
            argv += ["--weights", "frozen", "--engine", self._engine]
        process = subprocess.Popen(dying_with_parent(argv), env=self._environment)
        self._processes[role] = process
        self._undo.callback(ended, process)

    async def stop(self) -> None:
        """End all processes."""
        await self._stream.close_stream()
        await self._undo.aclose()

    def cpu_s(self) -> float:
        """CPU seconds of router and workers so far."""
        return sum(self.cpu_s_of(role) for role in self._processes)

    def cpu_s_of(self, role: str) -> float:
        """CPU seconds of one of them."""
        return cpu_s(self._processes[role].pid)

    async def run(self, prompts: list[list[int]], tokens: int) -> list[list[int]]:
        """Sample an answer to each prompt."""
        return await asyncio.gather(*(self._one(ids, tokens) for ids in prompts))

    async def _one(self, ids: list[int], tokens: int) -> list[int]:
        sampling = SamplingParams(temperature=1.0, top_p=1.0, max_tokens=tokens)
        return (await self.sample(ids, sampling)).ids

    async def sample(
        self, ids: list[int], sampling: SamplingParams, *, session_id: str = ""
    ) -> Answer:
        """Sample one answer; the number of the call is its seed."""
        call = next(self._calls)
        receiver = _Receiver()
        request = pb.SampleRequest(
            request_id=str(call),
            session_id=session_id,
            prompt_ids=int32_bytes(ids),
            sampling=sampling,
        )
        request.sampling.seed = call
        self._stream.send_request(request, receiver, timeout_s=REQUEST_S)
        await receiver.done
        return receiver.answer


async def start(
    model: Path, dtype: str, *, roles: tuple[str, ...], cache_mib: int
) -> tuple[Any, Callable[[], float]]:
    """Start a service; return its `run` and its `cpu_s`."""
    service = Service(model, dtype, roles=roles, cache_mib=cache_mib)
    await service.start()
    return service.run, service.cpu_s
