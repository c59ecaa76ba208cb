"""Adapters: trained weights, published weights, and checkpoints."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, FalconH1Config, PhimoeConfig

from forge.core.errors import ConfigError
from forge.rl.config import MtpConfig, ObjectiveConfig, OptimizerConfig
from forge.rl.learner.batch_plan import plan_batch
from forge.rl.model.policy import TreePolicy
from forge.rl.model.probe import check_policy
from forge.rl.model.small_config import small_config
from services.trainer.actors.learner import LearnerActor, Restore, TakeSnapshot
from services.trainer.checkpoint.history import CheckpointHistory
from services.trainer.checkpoint.store import CheckpointStore
from services.trainer.learner.model_replica import Capture, Take
from services.trainer.model.full_weights import load_model
from services.trainer.model.lora import LoraTrainee
from services.trainer.published.publisher import Snapshot
from services.trainer.setting_tables import LoraSettings
from tests.support.rl.models import make_sample, tiny_model
from tests.support.trainer.learners import started_learner

LORA = LoraSettings(rank=4, alpha=8.0, targets=("q_proj", "down_proj"))


def learner(model_path: Path, checkpoints: Path, **settings: Any) -> LearnerActor:
    optimizer = OptimizerConfig(learning_rate=1e-2)
    return started_learner(
        model_path, checkpoints, optimizer=optimizer, **{"lora": LORA, **settings}
    )


@pytest.fixture(scope="module")
def trained(
    model_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[LearnerActor, Path]]:
    """Three steps, and the checkpoint after them."""
    checkpoints = tmp_path_factory.mktemp("checkpoints")
    actor = learner(model_path, checkpoints)
    for _ in range(3):
        assert step(actor).skipped == ""
    contents = actor.receive(Capture())
    path = CheckpointStore(checkpoints).save(
        contents.write, step=3, weight_version=4, history=CheckpointHistory()
    )
    yield actor, path


def step(actor: LearnerActor) -> Any:
    rng = Random(3)
    samples = [make_sample([1, 2, 3, n, n + 1], (3, 5), rng=rng) for n in range(4)]
    plan = plan_batch(samples, token_budget=64, channels=32)
    return actor.receive(Take(plan=plan, weight_version=1))


def sent(actor: LearnerActor) -> dict[str, torch.Tensor]:
    snapshot: Snapshot = actor.receive(TakeSnapshot(step=3))
    return {
        one.name: torch.frombuffer(bytearray(one.data), dtype=torch.float32).reshape(one.shape)
        for one in snapshot.tensors
    }


def test_inference_gets_the_merged_adapters(
    trained: tuple[LearnerActor, Path], model_path: Path
) -> None:
    """Bit for bit PEFT's own merge of the checkpoint, under the base model's names."""
    actor, checkpoint = trained
    base = AutoModelForCausalLM.from_pretrained(model_path)
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    merged = PeftModel.from_pretrained(base, checkpoint / "adapter").merge_and_unload().state_dict()
    tensors = sent(actor)
    assert list(tensors) == list(before)
    assert all(torch.equal(tensors[name], merged[name]) for name in tensors)
    changed = {name for name in tensors if not torch.equal(tensors[name], before[name])}
    assert changed == {name for name in tensors if "q_proj" in name or "down_proj" in name}


def test_checkpoint_has_adapters_and_names_its_base(
    trained: tuple[LearnerActor, Path], model_path: Path
) -> None:
    """In a directory of their own: beside the merged model a loader would add them again."""
    _, checkpoint = trained
    adapter = checkpoint / "adapter"
    config = json.loads((adapter / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(model_path) and config["r"] == 4
    assert (adapter / "adapter_model.safetensors").stat().st_size < 40_000
    assert not (checkpoint / "master.safetensors").exists()
    assert not (checkpoint / "adapter_config.json").exists()


def test_restored_lora_run_takes_the_same_step(
    trained: tuple[LearnerActor, Path], model_path: Path
) -> None:
    """Adapters and optimizer are restored."""
    _, checkpoint = trained
    again = [learner(model_path, checkpoint.parent) for _ in range(2)]
    for actor in again:
        assert actor.receive(Restore()).step == 3
        step(actor)
    one, other = (sent(actor) for actor in again)
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert not torch.equal(one["model.layers.0.mlp.down_proj.weight"], sent(trained[0])[
        "model.layers.0.mlp.down_proj.weight"
    ])  # fmt: skip


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_lora_reference_is_the_base_without_adapters(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dropout: float
) -> None:
    """No second copy is loaded; every step equals that of a second copy, heads included."""
    copied = tmp_path / "copy"
    shutil.copytree(model_path, copied)
    loads: list[Path] = []

    def counted(path: Path, **named: Any) -> Any:
        loads.append(path)
        return load_model(path, **named)

    monkeypatch.setattr("services.trainer.learner.model_replica.load_model", counted)
    settings = {
        "objective": ObjectiveConfig(kl_coef=0.3, kl_estimator="k3"),
        "lora": replace(LORA, dropout=dropout),
        "mtp": MtpConfig(heads=1),
    }
    shared = learner(model_path, tmp_path / "shared", **settings)
    assert loads == [model_path]
    apart = learner(model_path, tmp_path / "apart", reference_path=str(copied), **settings)
    assert loads[1:] == [model_path, copied]
    for number in range(3):
        results = []
        for actor in (shared, apart):
            torch.manual_seed(number)
            results.append(step(actor))
        assert results[0].loss == results[1].loss
        assert results[0].stats == results[1].stats and results[0].mtp == results[1].mtp
    assert results[0].stats.reference_kl > 0
    one, other = sent(shared), sent(apart)
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_frozen_matrices_of_16_bits_change_no_step(
    family: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Base and teacher of a directory in bfloat16 keep their matrices in it: gradients, metrics and
    published weights are bit for bit those of float32 matrices. Adapters are trained in float32."""
    path, teacher = tmp_path / "model", tmp_path / "teacher"
    model = tiny_model(family, torch.bfloat16)
    model.save_pretrained(path)
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    model.save_pretrained(teacher)
    settings = {
        "autocast": "bfloat16",
        "publish_dtype": "float32",
        "objective": ObjectiveConfig(kl_coef=0.3, teacher_coef=0.2),
        "teacher_path": str(teacher),
        "lora": replace(LORA, targets=("q_proj", "o_proj")),
    }
    narrow = learner(path, tmp_path / "narrow", **settings)
    monkeypatch.setattr(
        "services.trainer.learner.sharded_start.store_frozen_narrow", lambda *_, **__: None
    )
    wide = learner(path, tmp_path / "wide", **settings)
    for _ in range(2):
        one, other = step(narrow), step(wide)
        assert one.skipped == "" and one.loss == other.loss and one.stats == other.stats
    found, expected = sent(narrow), sent(wide)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    for policy in (narrow._replica._learner.policy, narrow._replica._teacher):
        assert policy is not None
        types = {name: each.dtype for name, each in policy.model.named_parameters()}
        of_16_bits = {name for name, kind in types.items() if kind == torch.bfloat16}
        assert of_16_bits == {name for name in types if "_proj" in name and "lora" not in name}


def test_matrices_that_16_bits_would_change_stay(model_path: Path, tmp_path: Path) -> None:
    """Those of a model in float32: the published weights are its own."""
    actor = learner(model_path, tmp_path, autocast="bfloat16", publish_dtype="float32")
    assert step(actor).skipped == ""
    base = AutoModelForCausalLM.from_pretrained(model_path).state_dict()
    tensors = sent(actor)
    assert all(torch.equal(tensors[name], base[name]) for name in tensors if "k_proj" in name)


@pytest.mark.parametrize("other", ["base", "rank", "alpha"])
def test_checkpoint_of_other_adapters_is_refused(
    trained: tuple[LearnerActor, Path], model_path: Path, tmp_path: Path, other: str
) -> None:
    """Adapters on weights they were not trained on would be noise."""
    settings: dict[str, Any] = {}
    if other == "base":
        model = copy.deepcopy(AutoModelForCausalLM.from_pretrained(model_path))
        with torch.no_grad():
            model.lm_head.weight.add_(1e-3)
        model.save_pretrained(tmp_path)
        base, odd = tmp_path, "adapters for another base model"
    elif other == "alpha":
        base, settings, odd = model_path, {"alpha": 99.0}, "adapters with lora.alpha = .*99.0"
    else:
        base, settings, odd = model_path, {"rank": 2}, r"lora_A.weight is \(4, .*\(2, "
    with pytest.raises(ConfigError, match=rf"adapter_model.safetensors .*{odd}.*checkpoint.dir"):
        learner(base, trained[1].parent, lora=replace(LORA, **settings))


def test_adapter_checkpoint_is_refused_for_full_training(
    trained: tuple[LearnerActor, Path], model_path: Path
) -> None:
    """It is left where it is, as it is not damaged."""
    with pytest.raises(ConfigError, match=r"has no master\.safetensors: .*LoRA"):
        learner(model_path, trained[1].parent, lora=LoraSettings())
    assert trained[1].is_dir()


@pytest.mark.parametrize("target", ["nowhere", "lm_head"])
def test_impossible_lora_targets_are_one_line(
    model_path: Path, tmp_path: Path, target: str
) -> None:
    """With the setting and its value."""
    with pytest.raises(ConfigError, match=f"lora.targets = \\['{target}'\\]"):
        learner(model_path, tmp_path, lora=replace(LORA, targets=(target,)))


def test_adapters_of_a_mixture_of_experts_are_of_its_linear_layers(tmp_path: Path) -> None:
    """PEFT would put some on stacked experts and routers; its own merge of the checkpoint equals
    the published weights."""
    path = tmp_path / "model"
    tiny_model("qwen3_moe", torch.float32).save_pretrained(path)
    actor = learner(path, tmp_path, lora=replace(LORA, targets=("all-linear",)))
    for _ in range(2):
        assert step(actor).skipped == ""
    checkpoint = actor._checkpoints.save(
        actor.receive(Capture()).write, step=2, weight_version=3, history=CheckpointHistory()
    )
    base = AutoModelForCausalLM.from_pretrained(path)
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    merged = PeftModel.from_pretrained(base, checkpoint / "adapter").merge_and_unload().state_dict()
    published = AutoModelForCausalLM.from_pretrained(checkpoint).state_dict()
    assert all(torch.equal(published[name], merged[name]) for name in before)
    changed = {name for name in before if not torch.equal(published[name], before[name])}
    attention = [f"self_attn.{one}_proj.weight" for one in "qkvo"]
    assert changed == {f"model.layers.{layer}.{one}" for layer in range(2) for one in attention}


@pytest.mark.parametrize(
    ("config", "without"), [(PhimoeConfig(), "router"), (FalconH1Config(), "out_proj")]
)
def test_all_linear_leaves_out_what_cannot_have_adapters(config: Any, without: str) -> None:
    """Routers, whose results are no product alone, and layers that PEFT refuses; trees are exact
    with the others."""
    model = AutoModelForCausalLM.from_config(small_config(config), dtype=torch.float32)
    assert any(name.endswith(without) for name, _ in model.named_modules())
    trainee = LoraTrainee(model.eval(), LoraSettings(rank=2), model_path=Path())
    adapted = {name.partition(".lora_")[0] for name in trainee.master()}
    assert adapted and not any(name.endswith(without) for name in adapted)
    check_policy(TreePolicy(model))


def test_adapters_of_experts_are_refused_in_one_line(tmp_path: Path) -> None:
    """It names what can have some."""
    path = tmp_path / "model"
    tiny_model("qwen3_moe", torch.float32).save_pretrained(path)
    with pytest.raises(ConfigError, match=r"down_proj of its experts .*of this model are q_proj"):
        learner(path, tmp_path, lora=LORA)
