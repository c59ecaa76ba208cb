"""The model that a checkpoint keeps is the model that was published, byte for byte."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from forge.core.errors import DataLoss
from forge.rl.config import MtpConfig, OptimizerConfig
from services.trainer.actors.learner import LearnerActor, Restore, TakeSnapshot
from services.trainer.checkpoint.history import CheckpointHistory
from services.trainer.checkpoint.reading import master_weights
from services.trainer.checkpoint.store import CheckpointStore
from services.trainer.learner.model_replica import Capture
from services.trainer.published.publisher import Publisher
from services.trainer.published.versions import PublishedVersions
from services.trainer.setting_tables import LoraSettings
from tests.support.trainer.learners import started_learner, take_step
from tests.support.trainer.old_checkpoints import as_format_2, as_listed
from tests.support.trainer.published_weights import FakeRegister, fetch

LORA = LoraSettings(rank=4, alpha=8.0, targets=("q_proj", "down_proj"))
# Each type, and each way to train; the tensors' type does not depend on the way.
WAYS = [
    pytest.param({"publish_dtype": dtype, **way}, id=f"{dtype}-{name}")
    for dtype, name, way in (
        ("float32", "full", {}),
        ("float32", "heads", {"mtp": MtpConfig(heads=1)}),
        ("bfloat16", "full", {}),
        ("bfloat16", "lora", {"lora": LORA}),
        ("float16", "heads", {"mtp": MtpConfig(heads=1)}),
    )
]


def learner(model_path: Path, checkpoints: Path, settings: dict[str, Any]) -> LearnerActor:
    optimizer = OptimizerConfig(learning_rate=1e-3)
    return started_learner(model_path, checkpoints, optimizer=optimizer, **settings)


async def received(actor: LearnerActor) -> dict[str, tuple[str, bytes]]:
    """Type and bytes of each tensor that a worker gets."""
    versions = PublishedVersions(kept=2)
    publisher = Publisher(FakeRegister(), versions, source="host:1", floor=0)
    version = await publisher.publish(actor.receive(TakeSnapshot(step=3)))
    return {one.name: (one.dtype, one.data) for one in await fetch(versions.weights, version)}


def saved(actor: LearnerActor, checkpoints: Path, *, step: int) -> Path:
    return CheckpointStore(checkpoints).save(
        actor.receive(Capture()).write,
        step=step,
        weight_version=step + 1,
        history=CheckpointHistory(),
    )


def kept(path: Path) -> dict[str, tuple[str, bytes]]:
    """Type and bytes of each tensor in the model's files."""
    found: dict[str, torch.Tensor] = {}
    for name in ("model.safetensors", "mtp.safetensors"):
        if (path / name).is_file():
            with safe_open(path / name, framework="pt") as file:
                found |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    return {
        name: (str(one.dtype).removeprefix("torch."), bytes(one.view(torch.uint8).numpy().data))
        for name, one in found.items()
    }


@pytest.mark.parametrize("settings", WAYS)
async def test_kept_model_equals_the_published_one(
    model_path: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    """Before a resume, by the resume, and after a further step."""
    actor = learner(model_path, tmp_path, settings)
    for _ in range(3):
        take_step(actor)
    published = await received(actor)
    path = saved(actor, tmp_path, step=3)
    assert kept(path) == published

    resumed = learner(model_path, tmp_path, settings)
    assert resumed.receive(Restore()).step == 3
    assert await received(resumed) == published
    for one in (actor, resumed):
        take_step(one)
    continued = await received(resumed)
    assert continued == await received(actor) != published
    assert kept(saved(resumed, tmp_path, step=4)) == continued


@pytest.mark.parametrize("settings", WAYS)
async def test_transformers_loads_the_published_weights(
    model_path: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    """From the checkpoint's folder alone, in the published type, for any type in the starting
    model's configuration."""
    actor = learner(model_path, tmp_path, settings)
    take_step(actor)
    path = saved(actor, tmp_path, step=1)
    model, report = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not report["unexpected_keys"] and not report["missing_keys"]
    loaded = model.state_dict()
    for name, (dtype, data) in (await received(actor)).items():
        if not name.startswith("mtp."):
            assert str(loaded[name].dtype) == f"torch.{dtype}"
            assert bytes(loaded[name].contiguous().view(torch.uint8).numpy().data) == data, name


def as_before(path: Path) -> None:
    """Turn a checkpoint into what it was before it kept the published model: the master weights,
    or the adapters, in its place."""
    as_format_2(path)
    (path / "published.json").unlink()
    for name in ("adapter/adapter_model.safetensors", "adapter/adapter_config.json"):
        if (path / name).is_file():
            (path / "model.safetensors").unlink(missing_ok=True)
            (path / name).rename(path / Path(name).name)
    if (path / "master.safetensors").is_file():
        (path / "master.safetensors").rename(path / "model.safetensors")
    as_listed(path)


@pytest.mark.matrix
@pytest.mark.parametrize("before", [as_before, as_format_2])
@pytest.mark.parametrize("settings", WAYS)
async def test_checkpoint_of_an_earlier_release_opens(
    model_path: Path, tmp_path: Path, settings: dict[str, Any], before: Callable[[Path], None]
) -> None:
    """Also one without a kept model: it is published as it was, and the next step is the same."""
    actor = learner(model_path, tmp_path, settings)
    take_step(actor)
    published = await received(actor)
    before(saved(actor, tmp_path, step=1))
    resumed = learner(model_path, tmp_path, settings)
    assert resumed.receive(Restore()).step == 1
    assert await received(resumed) == published
    for one in (actor, resumed):
        take_step(one)
    assert await received(resumed) == await received(actor)


async def test_changed_publish_dtype_holds_from_the_resume(
    model_path: Path, tmp_path: Path
) -> None:
    """The resumed run's setting applies, computed from the master weights."""
    actor = learner(model_path, tmp_path, {"publish_dtype": "bfloat16"})
    take_step(actor)
    path = saved(actor, tmp_path, step=1)
    resumed = learner(model_path, tmp_path, {"publish_dtype": "float32"})
    resumed.receive(Restore())
    master = master_weights(path, adapters=False).read()
    for name, (dtype, data) in (await received(resumed)).items():
        assert dtype == "float32" and master[name].numpy().tobytes() == data


async def test_kept_model_with_one_flipped_bit_is_damaged(model_path: Path, tmp_path: Path) -> None:
    """The checkpoint is set aside, and the older one restored."""
    actor = learner(model_path, tmp_path, {"publish_dtype": "bfloat16"})
    for step in (1, 2):
        take_step(actor)
        path = saved(actor, tmp_path, step=step)
    data = bytearray((path / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (path / "model.safetensors").write_bytes(data)
    resumed = learner(model_path, tmp_path, {"publish_dtype": "bfloat16"})
    assert resumed.receive(Restore()).step == 1
    assert path.with_name(path.name + ".damaged").is_dir()
    with pytest.raises(DataLoss, match="sha256"):
        resumed.receive(TakeSnapshot(step=2, checkpoint=path.with_name(path.name + ".damaged")))


@pytest.mark.parametrize("file", ["state/rank-00000.safetensors", "learner.pt"])
def test_damaged_state_of_training_is_found(model_path: Path, tmp_path: Path, file: str) -> None:
    """One flipped bit: the older checkpoint is restored."""
    actor = learner(model_path, tmp_path, {"publish_dtype": "bfloat16"})
    for step in (1, 2):
        take_step(actor)
        path = saved(actor, tmp_path, step=step)
    data = bytearray((path / file).read_bytes())
    data[len(data) // 2] ^= 1
    (path / file).write_bytes(data)
    resumed = learner(model_path, tmp_path, {"publish_dtype": "bfloat16"})
    assert resumed.receive(Restore()).step == 1
    assert path.with_name(path.name + ".damaged").is_dir()


async def test_last_publication_is_read_from_the_kept_model(
    model_path: Path, tmp_path: Path
) -> None:
    """The files' tensors are sent, not those in memory."""
    actor = learner(model_path, tmp_path, {"publish_dtype": "bfloat16"})
    published = await received(actor)
    path = saved(actor, tmp_path, step=1)
    take_step(actor)
    again = actor.receive(TakeSnapshot(step=1, checkpoint=path))
    assert {one.name: (one.dtype, bytes(one.data)) for one in again.tensors} == published


@pytest.mark.parametrize("autocast", ["none", "bfloat16"])
async def test_step_trains_with_the_published_weights(
    model_path: Path, tmp_path: Path, autocast: str
) -> None:
    """A second run from the kept model computes the same loss, to the bit: the master weights
    behind it are no policy."""
    settings = {"publish_dtype": "bfloat16", "autocast": autocast}
    actor = learner(model_path, tmp_path / "a", settings)
    take_step(actor)
    path = saved(actor, tmp_path / "a", step=1)
    fresh = learner(path, tmp_path / "b", settings)
    assert take_step(actor).loss == take_step(fresh).loss
