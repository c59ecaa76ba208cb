"""Ranks that each publish a part of the weights, against weights that rank 0 gathers."""

from __future__ import annotations

import os
import signal
from bisect import bisect_right
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from forge.core.errors import Unavailable
from forge.rl.config import OptimizerConfig
from forge.rl.learner.batch_plan import plan_batch
from forge.runtime.weights import ERROR_KEY, WeightAnnouncement, WeightManifest, manifest_key
from services.trainer.actors.learner import LearnerActor, TakeSnapshot
from services.trainer.checkpoint.files import named_tensors
from services.trainer.learner.model_replica import ReadPublished, Take
from services.trainer.mesh import MeshSettings
from services.trainer.setting_tables import LoraSettings
from tests.support.inference.weight_sources import Worker
from tests.support.rl.models import make_sample, tiny_model
from tests.support.trainer.learners import started_learner
from tests.support.trainer.published_weights import FakeRegister, serving_publisher
from tests.support.trainer.segments import segment_config

pytestmark = pytest.mark.timeout(900)


class Trainer:
    """A learner of several ranks, and its publisher."""

    def __init__(self, folder: Path, family: str, **settings: Any) -> None:
        model_path = folder / "model"
        tiny_model(family, torch.float32).save_pretrained(model_path)
        self.actor: LearnerActor = started_learner(
            model_path,
            folder / "checkpoints",
            publish_from="ranks",
            key_file=segment_config(folder).key_file,
            optimizer=OptimizerConfig(learning_rate=1e-6),
            **settings,
        )
        self.register = FakeRegister()
        self.steps = 0

    def step(self) -> None:
        rng = Random(self.steps)
        samples = [make_sample([rng.randrange(13) for _ in range(12)], (4, 12), rng=rng)]
        plan = plan_batch(samples, token_budget=64, channels=16)
        self.actor.receive(Take(plan=plan, weight_version=1))
        self.steps += 1

    def gathered(self) -> dict[str, bytes]:
        """All published tensors, as rank 0 gathers them."""
        tensors, _ = self.actor._order(ReadPublished())
        return {one.name: bytes(one.data) for one in named_tensors(tensors)}

    @property
    def announced(self) -> WeightAnnouncement:
        return WeightAnnouncement.decode(self.register.entries[manifest_key()].value)


@asynccontextmanager
async def subscriber(trainer: Trainer) -> AsyncIterator[Worker]:
    """A worker that observes the newest announcement."""
    worker = Worker(silence_s=60.0)
    worker._announcements.put_nowait(trainer.announced.encode())
    yield worker
    await worker.stop()


@pytest.mark.parametrize(
    ("family", "lora", "mesh"),
    [
        ("llama", 0, MeshSettings(dp_shard=4)),
        ("qwen3_moe", 0, MeshSettings(dp_shard=2)),
        ("llama", 2, MeshSettings(dp_replicate=2, dp_shard=2)),
        ("qwen3_moe", 0, MeshSettings(dp_shard=2, tp=2)),
        ("llama", 2, MeshSettings(dp_shard=2, tp=2)),
    ],
    ids=[
        "tied, 4 shards",
        "experts, 2 shards",
        "adapters, 2 copies of 2 shards",
        "experts, 2 shards of 2 parts",
        "adapters, 2 shards of 2 parts",
    ],
)
async def test_worker_gets_the_gathered_weights_from_all_ranks(
    tmp_path: Path, family: str, lora: int, mesh: MeshSettings
) -> None:
    """Bit for bit, with their tied names and those of the hub, and again as deltas after a step;
    rank 0 keeps a share alone."""
    ranks = mesh.dp_replicate * mesh.dp_shard * mesh.tp
    trainer = Trainer(
        tmp_path,
        family,
        ranks=ranks,
        mesh=mesh,
        lora=LoraSettings(rank=lora, targets=("q_proj", "down_proj")),
        publish_dtype="float32" if lora else "bfloat16",
    )
    try:
        async with serving_publisher(trainer.register) as (publisher, versions):
            snapshot = trainer.actor.receive(TakeSnapshot(step=0))
            expected = trainer.gathered()
            await publisher.publish(snapshot)
            total, largest = sum(map(len, expected.values())), max(map(len, expected.values()))
            own = sum(len(one.data) for one in versions.weights[1].tensors)
            assert own <= total / ranks + largest
            manifest = WeightManifest.decode(versions.weights[1].manifest)
            aliases = {one.name: list(one.aliases) for one in manifest.tensors if one.aliases}
            assert aliases == trainer.actor._replica.tied_names()
            assert len(trainer.announced.segments) == ranks
            async with subscriber(trainer) as worker:
                assert await worker.until_serving(1) == expected
                received = worker.follower.weights[1].tensors
                named = {one.name for tensor in received for one in tensor.in_hub_names()}
                assert named == load_file(tmp_path / "model" / "model.safetensors").keys()
                trainer.step()
                stepped = trainer.gathered()
                await publisher.publish(trainer.actor.receive(TakeSnapshot(step=1)))
                worker._announcements.put_nowait(trainer.announced.encode())
                assert await worker.until_serving(2) == stepped
                deltas = worker.follower.weights[2].deltas
            firsts = [one.first for one in trainer.announced.segments]
            owners = {bisect_right(firsts, list(expected).index(name)) for name in deltas.by_name}
            assert lora or len(owners) == len(firsts), "every rank sends deltas"
    finally:
        trainer.actor.stopped()


async def test_killed_rank_leaves_the_version_before_until_all_start_again(tmp_path: Path) -> None:
    """SIGKILL between the copy and the announcement: nothing is announced, a new worker names the
    rank that it lacks, and takes the version of the restarted ranks."""
    trainer = Trainer(tmp_path, "llama", ranks=2, mesh=MeshSettings(dp_shard=2))
    try:
        async with serving_publisher(trainer.register) as (publisher, versions):
            await publisher.publish(trainer.actor.receive(TakeSnapshot(step=0)))
            lost = trainer.announced.segments[1].source
            trainer.step()
            snapshot = trainer.actor.receive(TakeSnapshot(step=1))
            assert trainer.actor._ranks is not None
            (process,) = trainer.actor._ranks._processes
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
            with pytest.raises(Unavailable, match="rank 1 has ended with exit code -9"):
                await publisher.publish(snapshot)
            assert trainer.announced.weight_version == 1

            async with subscriber(trainer) as worker:
                found = await worker.until_announced(lambda metadata: ERROR_KEY in metadata)
                assert f"version 1: {lost}: " in found[ERROR_KEY]
                trainer.actor.stopped()
                trainer.actor.started()
                expected = trainer.gathered()
                await publisher.publish(trainer.actor.receive(TakeSnapshot(step=0)))
                worker._announcements.put_nowait(trainer.announced.encode())
                assert await worker.until_serving(3) == expected
            assert [one.weight_version for one in versions.published] == [3]
    finally:
        trainer.actor.stopped()
