"""Tests: a publication names the tensors of the hub, through relays and deltas to the engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from structlog.testing import capture_logs

from forge.core.errors import InvalidArgument
from forge.core.named_tensor import NamedTensor
from forge.rl.config import OptimizerConfig
from forge.rl.model import hub_names
from forge.rl.model.hub_names import HubNames
from forge.runtime.weights import WeightAnnouncement, WeightManifest, manifest_key
from services.inference.engines.meta_model import meta_model
from services.inference.engines.tensor_bytes import from_named
from services.inference.engines.tensorrt_llm.weights.checkpoint import read_checkpoint
from services.inference.engines.vllm.staging import Checkpoint
from services.trainer.actors.learner import TakeSnapshot
from services.trainer.model.full_weights import load_model
from services.trainer.published.publisher import Snapshot
from services.trainer.setting_tables import LoraSettings
from tests.support.inference.weight_sources import Worker
from tests.support.rl.models import tiny_model
from tests.support.trainer.learners import started_learner, take_step
from tests.support.trainer.published_weights import FakeRegister, serving_publisher


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory as on the hub: with one matrix per expert."""
    path = tmp_path_factory.mktemp("mixtral")
    tiny_model("mixtral", torch.float32).save_pretrained(path)
    return path


def saved(snapshot: Snapshot, model_path: Path, directory: Path) -> dict[str, torch.Tensor]:
    """The tensors of transformers' own `save_pretrained`."""
    own = {one.name: from_named(one) for one in snapshot.tensors}
    model = load_model(model_path, dtype=next(iter(own.values())).dtype)
    model.load_state_dict(own)
    model.save_pretrained(directory)
    found: dict[str, torch.Tensor] = load_file(directory / "model.safetensors")
    return found


def equal(found: Any, expected: dict[str, torch.Tensor]) -> bool:
    tensors = {one.name: from_named(one) for one in found}
    same = all(torch.equal(tensors[name], one) for name, one in expected.items())
    return tensors.keys() == expected.keys() and same


@pytest.mark.parametrize("rank", [0, 2])
async def test_engines_get_the_tensors_of_the_hub_without_a_conversion(
    mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    """Bit for bit as transformers would save them: of a first version, of one that came as deltas,
    and from a worker that relays; adapters are merged."""
    register = FakeRegister()
    actor = started_learner(
        mixtral,
        tmp_path / "none",
        lora=LoraSettings(rank=rank),
        publish_dtype="bfloat16" if not rank else "float32",
        optimizer=OptimizerConfig(learning_rate=1e-3),
    )
    library = read_checkpoint(str(mixtral))
    vllm = Checkpoint(meta_model(str(mixtral)), served=torch.float32)
    assert vllm.tensors  # the start tries a load of them
    async with serving_publisher(register) as (publisher, _):
        first, second = Worker(silence_s=60.0), Worker(silence_s=60.0)
        relay = await first.serve()
        for version in (1, 2):
            snapshot = actor.receive(TakeSnapshot(step=version))
            expected = saved(snapshot, mixtral, tmp_path / f"{version}")
            await publisher.publish(snapshot)
            announced = register.entries[manifest_key()].value
            first._announcements.put_nowait(announced)
            await first.until_serving(version)
            second.show([relay], version=version)
            second._announcements.put_nowait(announced)
            await second.until_serving(version)
            with monkeypatch.context() as patched:
                patched.setattr(hub_names, "revert_weight_conversion", None)
                for worker in (first, second):
                    tensors = tensors_of(worker, version)
                    assert equal(vllm.stage(tensors, version=version).loaded(), expected)
                    assert equal(library.fit(tensors, version=version).loaded(), expected)
            take_step(actor)
        assert second.follower.weights[2].manifest == first.follower.weights[2].manifest
        await second.stop()
        await first.stop()


def tensors_of(worker: Worker, version: int) -> dict[str, NamedTensor]:
    return {one.name: one for one in worker.follower.weights[version].tensors}


def test_names_are_found_once(
    mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without ranges the trainer publishes no names, and its log has one line."""
    actor = started_learner(mixtral, tmp_path)
    found = actor.receive(TakeSnapshot(step=1)).hub
    assert found and actor.receive(TakeSnapshot(step=1)).hub is found

    def refuses(*_: object) -> None:
        raise InvalidArgument("a is no range of b")

    monkeypatch.setattr(HubNames, "parts", refuses)
    without = started_learner(mixtral, tmp_path)
    with capture_logs() as logs:
        assert [without.receive(TakeSnapshot(step=1)).hub for _ in range(2)] == [None, None]
    reasons = [one["reason"] for one in logs if one["event"] == "hub_names_not_published"]
    assert reasons == ["InvalidArgument('a is no range of b')"]


async def test_manifest_of_the_announcement_has_the_names(mixtral: Path, tmp_path: Path) -> None:
    """Its sha256 covers them."""
    register = FakeRegister()
    actor = started_learner(mixtral, tmp_path)
    async with serving_publisher(register) as (publisher, versions):
        await publisher.publish(actor.receive(TakeSnapshot(step=1)))
        encoded = versions.weights[1].manifest
        announced = WeightAnnouncement.decode(register.entries[manifest_key()].value)
        assert announced.open(encoded) == WeightManifest.decode(encoded)
        assert announced.open(encoded).hub == actor.receive(TakeSnapshot(step=1)).hub
