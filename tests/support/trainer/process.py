"""A real trainer as a child process, on a model small enough to step in milliseconds."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from forge.core.errors import Unavailable
from forge.runtime.coordination import Coordinator, Versioned
from forge.runtime.rpc.channel import Channels
from forge.runtime.rpc.chunks import Joiner
from forge.runtime.rpc.remote import Remote
from forge.runtime.rpc.status import translated
from forge.v1 import common_pb2, inference_pb2, trainer_pb2
from forge.v1.inference_pb2_grpc import WeightServiceStub
from forge.v1.trainer_pb2_grpc import TrainerServiceStub
from tests.support.rl.models import tiny_model
from tests.support.runtime.etcd import EtcdServer
from tests.support.runtime.log_lines import log_lines
from tests.support.runtime.service_process import ServiceProcess, start_service
from tests.support.runtime.waiting import until

START_S = 240.0
"""Until a process has started, taken its steps or ended, on a machine with ten others to run."""
CALL_S = 120.0
"""Paces the calls to a trainer that is starting."""
WEIGHTS_KEY = "weights/default/latest"


class TrainerProcess:
    """One `python -m services.trainer` with its model, checkpoints and log under `folder`."""

    def __init__(
        self,
        folder: Path,
        *,
        etcd: EtcdServer,
        cluster: str,
        key_file: Path,
        access: Sequence[str] = (),
    ) -> None:
        """`access`: flags of a secure etcd."""
        self.model_path = folder / "model"
        self.checkpoints = folder / "checkpoints"
        self.metrics_file = folder / "metrics.jsonl"
        self.log_path = folder / "trainer.log"
        if not self.model_path.exists():
            tiny_model("qwen3", torch.float32).save_pretrained(self.model_path)
        self._argv = [
            *("--etcd", etcd.endpoint),
            *("--cluster", cluster, "--key-file", str(key_file), "--instance-id", "trainer"),
            *("--model-path", str(self.model_path), "--checkpoint.dir", str(self.checkpoints)),
            *("--metrics-file", str(self.metrics_file), "--log-file", str(self.log_path)),
            *("--lease-ttl-s", "2", "--torch-threads", "1", "--optimizer.learning-rate", "1e-3"),
            *access,
        ]
        self.process: ServiceProcess | None = None

    def start_on(self, host: str, mounted: Path, **settings: object) -> None:
        """Start under another host name, with the directory `mounted` at `checkpoints`."""
        self.checkpoints.mkdir()
        script = f'hostname {host} && mount --bind "$0" "$1" && shift && exec "$@"'
        service = [sys.executable, "-m", "services.trainer", *self._argv, *_flags(settings)]
        namespaces = ["unshare", "--user", "--map-root-user", "--uts", "--mount", "sh", "-c"]
        self.process = subprocess.Popen(
            [*namespaces, script, str(mounted), str(self.checkpoints), *service],
            stderr=subprocess.PIPE,
            text=True,
        )

    def start(self, **settings: object) -> None:
        """`table__key` is the setting `table.key`."""
        self.process = start_service(
            "services.trainer", *self._argv, *_flags(settings), stderr=subprocess.PIPE
        )

    def start_torchrun(self, ranks: int, **settings: object) -> None:
        """Start that many ranks, as an operator does on one host; `torchrun.log` has its stderr."""
        elastic = ("--standalone", "--nproc-per-node", str(ranks), "--max-restarts", "3")
        with self.log_path.with_name("torchrun.log").open("a") as output:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "torch.distributed.run", *elastic, "-m"),
                    *("services.trainer", *self._argv, *_flags(settings)),
                ],
                stderr=output,
                text=True,
            )

    def flags(self, **settings: object) -> list[str]:
        """The flags of a start with these settings."""
        return [*self._argv, *_flags(settings)]

    def kill(self) -> None:
        """SIGKILL, if it runs."""
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None

    def terminate(self) -> int:
        """SIGTERM; the exit code."""
        assert self.process is not None
        self.process.terminate()
        return self.wait()[0]

    def wait(self) -> tuple[int, str]:
        """Exit code and stderr, once it has ended."""
        assert self.process is not None
        _, stderr = self.process.communicate(timeout=START_S)
        return self.process.wait(), stderr

    def logged(self, event: str) -> list[dict[str, Any]]:
        """Log lines of one event."""
        if not self.log_path.exists():
            return []
        return [line for line in log_lines(self.log_path) if line["event"] == event]

    def recorded_steps(self) -> list[int]:
        """Steps in the metrics file."""
        return [json.loads(line)["step"] for line in self.metrics_file.read_text().splitlines()]


def _flags(settings: Mapping[str, object]) -> list[str]:
    return [
        f"--{key.replace('__', '.').replace('_', '-')}={value}" for key, value in settings.items()
    ]


class TrainerClient:
    """What operators and inference workers ask of a trainer."""

    def __init__(self, coordinator: Coordinator, channels: Channels) -> None:
        self._coordinator = coordinator
        self._channels = channels
        self._trainers = Remote(coordinator, channels, kind="trainer", stub=TrainerServiceStub)

    async def status(self) -> trainer_pb2.GetTrainerStatusResponse:
        answer: trainer_pb2.GetTrainerStatusResponse = await self._trainers.call(
            "GetTrainerStatus",
            trainer_pb2.GetTrainerStatusRequest(),
            timeout_s=CALL_S,
            retry_for_s=START_S,
        )
        return answer

    async def save(self) -> trainer_pb2.SaveCheckpointResponse:
        answer: trainer_pb2.SaveCheckpointResponse = await self._trainers.call(
            "SaveCheckpoint",
            trainer_pb2.SaveCheckpointRequest(),
            timeout_s=CALL_S,
            retry_for_s=START_S,
        )
        return answer

    async def steps(self, *, after: int = 0) -> AsyncIterator[trainer_pb2.StepMetrics]:
        """Steps as they are taken, from whichever process is the trainer now."""
        _, stub = await self._trainers.pick(timeout_s=START_S)
        call: Any = stub.WatchSteps(trainer_pb2.WatchStepsRequest(after_step=after))
        async with translated():
            async for response in call:
                yield response.metrics

    async def until_step(self, step: int, *, after: int = 0) -> trainer_pb2.StepMetrics:
        """The metrics of `step`, once it has been taken, by whichever process it is."""

        async def taken() -> trainer_pb2.StepMetrics | None:
            with contextlib.suppress(Unavailable):
                async for metrics in self.steps(after=after):
                    if metrics.step >= step:
                        return metrics
            return None

        async with asyncio.timeout(START_S):
            return await until(taken, limit_s=START_S)

    async def manifests(self) -> AsyncIterator[dict[str, Any]]:
        """Announced weights: the current ones, then each change."""
        announced: Versioned | None
        async for announced in self._coordinator.follow(WEIGHTS_KEY):
            if announced is not None:
                yield json.loads(announced.value)

    async def until_version(self, version: int) -> dict[str, Any]:
        """The first manifest announced of at least that version."""
        async with asyncio.timeout(START_S):
            async for manifest in self.manifests():
                if manifest["weight_version"] >= version:
                    return manifest
        raise AssertionError("the stream of manifests does not end")

    async def fetch(
        self, address: str, version: int, *, segment_from: int | None = None
    ) -> list[common_pb2.Tensor]:
        """The weights of one version, as a worker gets them; or the segment of a rank, which begins
        with that tensor."""
        stub = WeightServiceStub(self._channels.get(address))
        request = inference_pb2.FetchWeightsRequest(
            weight_version=version,
            from_tensor=segment_from or 0,
            segments=segment_from is not None,
        )
        joiner = Joiner()
        tensors = []
        call: Any = stub.FetchWeights(request, timeout=CALL_S)
        async with translated():
            async for response in call:
                whole = joiner.add(response.tensor)
                if whole is not None:
                    tensors.append(common_pb2.Tensor.FromString(whole))
        return tensors


def ranks_of(trainer: TrainerProcess) -> dict[int, psutil.Process]:
    """The processes that torchrun runs now, by rank."""
    assert trainer.process is not None
    found: dict[int, psutil.Process] = {}
    if trainer.process.poll() is not None:
        return found
    for child in psutil.Process(trainer.process.pid).children():
        if (rank := child.environ().get("RANK")) is not None:
            found[int(rank)] = child
    return found
