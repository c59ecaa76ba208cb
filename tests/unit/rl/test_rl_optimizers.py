"""Optimizers by name: their steps, and their states in a checkpoint."""

from __future__ import annotations

import io
from random import Random
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from forge.core.errors import ConfigError, InvalidArgument
from forge.rl.config import OPTIMIZERS, LearnerConfig, OptimizerConfig, OptimizerName
from forge.rl.learner.learner import Learner
from forge.rl.model.policy import TreePolicy
from forge.rl.optimizers import Optimizers
from tests.support.rl.models import make_sample, tiny_model


def learner(name: OptimizerName, **constants: Any) -> Learner:
    if name == "adamw_8bit":
        pytest.importorskip("bitsandbytes")
    optimizer = OptimizerConfig(name=name, learning_rate=1e-2, **constants)
    config = LearnerConfig(optimizer=optimizer)
    return Learner(TreePolicy(tiny_model("qwen3", torch.float32)), config)


def step(one: Learner) -> None:
    rng = Random(3)
    samples = [make_sample([1, 2, 3, n, n + 1], (3, 5), rng=rng) for n in range(4)]
    assert one.step(one.plan(samples), weight_version=1).skipped == ""


def weights(one: Learner) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in one.policy.model.state_dict().items()}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_continues_from_its_state_bit_for_bit(name: OptimizerName) -> None:
    """Through a file that is read without unpickling code."""
    one, other = learner(name), learner(name)
    before = weights(one)
    for _ in range(2):
        step(one)
    changed = [key for key, tensor in weights(one).items() if not torch.equal(tensor, before[key])]
    assert len(changed) == len(before)
    other.policy.model.load_state_dict(weights(one))
    file = io.BytesIO()
    torch.save(one.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    step(one)
    step(other)
    mine, theirs = weights(one), weights(other)
    assert all(torch.equal(mine[key], theirs[key]) for key in mine)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_restored_optimizer_uses_the_current_constants(name: OptimizerName) -> None:
    """A setting changed between two runs takes effect: the checkpoint has moments, not
    constants."""
    one = learner(name)
    step(one)
    other = learner(name, adam_beta1=0.5, adam_beta2=0.6, weight_decay=0.25, muon_momentum=0.3)
    other.load_state_dict(one.state_dict())
    groups = [group for part in other._optimizer._parts for group in part.param_groups]
    assert {group["betas"] for group in groups if "betas" in group} == {(0.5, 0.6)}
    assert {group["momentum"] for group in groups if "momentum" in group} <= {0.3}
    assert 0.25 in {group["weight_decay"] for group in groups}


def test_no_memory_for_the_optimizer_state_names_the_setting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Smaller passes cannot help there; later shortages do not name it."""

    def short(self: Any, closure: Any = None) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    fresh, going = learner("adamw"), learner("adamw")
    step(going)
    monkeypatch.setattr(torch.optim.AdamW, "step", short)
    with pytest.raises(ConfigError, match=r"optimizer.name = 'adamw': .*2\.00 GiB.*adamw_8bit"):
        step(fresh)
    with pytest.raises(torch.OutOfMemoryError):
        step(going)


def test_state_of_another_optimizer_is_refused() -> None:
    """Both are named."""
    with pytest.raises(InvalidArgument, match=r"'adamw' cannot continue.*'muon'"):
        learner("adamw").load_state_dict(learner("muon").state_dict())


def test_muon_updates_matrices_and_adamw_the_rest() -> None:
    """A matrix' first update is orthogonal times 0.2 sqrt(larger side); a norm's is AdamW's."""
    model = tiny_model("qwen3", torch.float32)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    Optimizers(model, OptimizerConfig(name="muon")).step(1e-2)
    moved = {name: (p.detach() - before[name]) / 1e-2 for name, p in model.named_parameters()}
    turned = moved["model.layers.0.mlp.up_proj.weight"]
    spectrum = torch.linalg.svdvals(turned) / (0.2 * 24**0.5)
    assert spectrum.min() > 0.6 and spectrum.max() < 1.3
    for name in ("model.norm.weight", "model.embed_tokens.weight", "lm_head.weight"):
        assert moved[name].abs().sub(1).abs().max() < 1e-3


def test_muon_leaves_tables_to_adamw() -> None:
    """Mamba's `A_log` has two dimensions and is no map; neither are embeddings of positions."""
    positions = {"n_embd": 8, "n_head": 2, "n_layer": 1, "n_positions": 6, "vocab_size": 9}
    for model, tables in (
        (tiny_model("mamba", torch.float32), ["A_log"]),
        (GPT2LMHeadModel(GPT2Config(**positions)), ["wte.weight", "wpe.weight"]),
    ):
        muon, _ = Optimizers(model, OptimizerConfig(name="muon"))._parts
        matrices = {id(one) for group in muon.param_groups for one in group["params"]}
        others = {
            name.removeprefix("transformer.").rpartition("mixer.")[2]
            for name, one in model.named_parameters()
            if one.ndim == 2 and id(one) not in matrices
        }
        assert others - {"backbone.embeddings.weight"} == set(tables)


def test_eight_bit_states_are_used_for_large_weights() -> None:
    """A quarter of the memory, and nearly AdamW's steps."""
    pytest.importorskip("bitsandbytes")
    updates: dict[str, torch.Tensor] = {}
    for name in ("adamw", "adamw_8bit"):
        torch.manual_seed(0)
        model: Any = tiny_model("qwen3", torch.float32)
        model.model.layers[0].mlp.up_proj.weight = torch.nn.Parameter(torch.zeros(128, 128))
        optimizers = Optimizers(model, OptimizerConfig(name=name))
        for _ in range(3):
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter)
            optimizers.step(1e-2)
        updates[name] = model.model.layers[0].mlp.up_proj.weight.detach()
        (large,) = [
            values
            for values in optimizers._parts[0].state.values()
            if any(getattr(v, "shape", ()) == (128, 128) for v in values.values())
        ]
        kinds = {v.dtype for v in large.values() if getattr(v, "shape", ()) == (128, 128)}
        assert kinds == {torch.uint8 if name == "adamw_8bit" else torch.float32}
    error = (updates["adamw"] - updates["adamw_8bit"]).norm() / updates["adamw"].norm()
    assert error < 0.05


def test_norms_are_not_decayed() -> None:
    """Weight decay pulls matrices alone towards zero."""
    model = tiny_model("qwen3", torch.float32)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    Optimizers(model, OptimizerConfig(weight_decay=0.1)).step(0.5)
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter, before[name] * (0.95 if parameter.ndim > 1 else 1.0))
