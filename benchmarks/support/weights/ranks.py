"""Publication by ranks that divide the weights: memory of each rank, and the bytes it sends.

Learner, ranks, publisher, followers and etcd are real; the model has random weights. Each way has
a process of its own, so that its memory is not that of an earlier one.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
from prometheus_client import REGISTRY
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.support.weights.stream import Started, follow_weights
from forge.runtime import weights
from forge.runtime.actors.actor_system import ActorSystem
from forge.runtime.coordination import Coordinator
from forge.runtime.rpc.server import RpcServer
from forge.runtime.security.credentials import Security
from forge.runtime.weights.delta import DeltaEncoder
from forge.v1 import inference_pb2_grpc as rpc
from services.trainer.actors.learner import LearnerActor, TakeSnapshot
from services.trainer.checkpoint.store import CheckpointStore
from services.trainer.config import TrainerConfig
from services.trainer.mesh import MeshSettings
from services.trainer.metrics import WEIGHT_SENT_BYTES
from services.trainer.published.publisher import Publisher
from services.trainer.published.versions import PublishedVersions

RANKS = 4
_UNBOUNDED_S = 3600.0
_MB = 1e6


def make_model(path: Path, hidden: int) -> None:
    """Write a model of random weights with a large vocabulary."""
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=8,
        num_attention_heads=8,
        vocab_size=8 * hidden,
    )
    LlamaForCausalLM(config).save_pretrained(path)


def rank_publication(folder: Path, etcd: str, *, hidden: int, workers: int) -> dict[str, float]:
    """Return, by `publish_from`, the largest growth of a rank's memory in the first publication,
    and the most bytes that one rank sends to `workers` over those of the model."""
    model = folder / "ranks-model"
    _elsewhere(make_model, model, hidden)
    key_file = folder / "key"
    # That of `security()` in the followers.
    key_file.write_text("k" * 32 + "\n")
    key_file.chmod(0o600)
    numbers: dict[str, float] = {}
    for way in ("rank_0", "ranks"):
        config = TrainerConfig(
            model_path=str(model),
            key_file=str(key_file),
            ranks=RANKS,
            mesh=MeshSettings(dp_shard=RANKS),
            publish_dtype="bfloat16",
            publish_from=way,
            torch_threads=1,
        )
        numbers |= _elsewhere(_publish, config, folder / way, etcd, way, workers)
    return numbers


def _elsewhere(work: Callable[..., Any], *arguments: Any) -> Any:
    """The result of `work` in a process of its own."""
    # So that freed memory of the start is returned, and does not hide the growth.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = os.environ["MALLOC_TRIM_THRESHOLD_"] = "131072"
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_send_result, args=(theirs, work, *arguments))
    process.start()
    theirs.close()
    result = ours.recv()
    process.join()
    return result


def _send_result(pipe: Connection, work: Callable[..., Any], *arguments: Any) -> None:
    pipe.send(work(*arguments))


def _publish(
    config: TrainerConfig, folder: Path, etcd: str, way: str, workers: int
) -> dict[str, float]:
    return asyncio.run(_published(config, folder, etcd, way, workers=workers))


async def _published(
    config: TrainerConfig, folder: Path, etcd: str, way: str, *, workers: int
) -> dict[str, float]:
    actors = ActorSystem(way)
    coordinator = await Coordinator.connect(etcd, cluster=f"ranks-{way}")
    learner = LearnerActor(config, CheckpointStore(folder))
    versions, server = PublishedVersions(kept=2), _server(config)
    servicer = weights.WeightServicer(
        lambda: versions.weights, deltas=DeltaEncoder(), sent=WEIGHT_SENT_BYTES.labels("0").inc
    )
    server.add_service(
        rpc.add_WeightServiceServicer_to_server, servicer, full_name=weights.FULL_NAME
    )
    followers: list[Started] = []
    try:
        ref = await actors.spawn(lambda: learner, name="learner")
        publisher = Publisher(coordinator, versions, source=await server.start(), floor=0)
        for number in range(workers):
            arguments = (follow_weights, etcd, f"ranks-{way}", f"w{number}")
            followers.append(await asyncio.to_thread(Started, *arguments))
        assert learner._ranks is not None
        pids = [os.getpid(), *(one.pid for one in learner._ranks._processes if one.pid)]
        before = [_begin_peak(pid) for pid in pids]
        snapshot = await ref.ask(TakeSnapshot(step=0), timeout_s=_UNBOUNDED_S)
        version = await publisher.publish(snapshot)
        for one in followers:
            one.begin("until", version)
        for one in followers:
            await asyncio.to_thread(one.answer)
        peaks = [_peak_bytes(pid) - was for pid, was in zip(pids, before, strict=True)]
        if snapshot.others is not None:  # their answers have the bytes sent so far
            await snapshot.others.keep(versions.divided)
        egress = [_sent_bytes(rank) for rank in range(RANKS)]
        total = versions.published[-1].announcement.total_bytes
    finally:
        for one in followers:
            one.end()
        await server.stop(grace_s=0)
        await actors.stop()
        await coordinator.close()
    return {
        "ranks.weights_mb": total / _MB,
        f"ranks.peak_mb.{way}": max(peaks) / _MB,
        f"ranks.most_sent_over_weights.{way}": max(egress) / total,
        f"ranks.all_sent_over_weights.{way}": sum(egress) / total,
    }


def _server(config: TrainerConfig) -> RpcServer:
    security = Security.from_config(config)
    return RpcServer(service="trainer", host="127.0.0.1", port=0, security=security)


def _begin_peak(pid: int) -> int:
    """Forget the largest resident size so far; returns the present one, in bytes."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    return int(psutil.Process(pid).memory_info().rss)


def _peak_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def _sent_bytes(rank: int) -> float:
    labels = {"rank": str(rank)}
    return REGISTRY.get_sample_value("forge_trainer_weight_sent_bytes_total", labels) or 0.0
