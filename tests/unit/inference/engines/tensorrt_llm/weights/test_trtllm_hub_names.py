"""Tests: versions under the names of transformers reach the library under those of the hub."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Glm4MoeConfig,
    MixtralConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
)

from services.inference.engines.base import UnfitWeights
from services.inference.engines.tensorrt_llm.arguments import Role
from services.inference.engines.tensorrt_llm.weights import buckets, own_names
from services.inference.engines.tensorrt_llm.weights.checkpoint import read_checkpoint
from tests.contract.engines import SHAPE, prompt_ids, published
from tests.support.inference.hub_parts import with_hub_names
from tests.support.inference.tensorrt_llm import both, core_of, started
from tests.support.inference.tensorrt_llm_fake.behaviour import Behaviour
from tests.support.inference.transformers_answers import greedy_of

_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
_GROUPS = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
_LATENT = {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "v_head_dim": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "num_key_value_heads": 4,
}
FAMILIES: dict[str, Any] = {
    "mixtral": MixtralConfig(**SHAPE, num_local_experts=4),
    "qwen3_moe": Qwen3MoeConfig(**SHAPE, **_EXPERTS, head_dim=16, num_experts=4),
    "deepseek_v3": DeepseekV3Config(**{**SHAPE, **_EXPERTS, **_GROUPS, **_LATENT}),
    "glm4_moe": Glm4MoeConfig(**SHAPE, **_EXPERTS, **_GROUPS, head_dim=16),
}


def model_of(family: str, *, seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(FAMILIES[family], dtype=torch.float32)
    return model.eval().requires_grad_(False)


@pytest.mark.parametrize(
    ("family", "named"), [*((one, False) for one in FAMILIES), ("mixtral", True)]
)
async def test_update_of_stacked_experts_equals_a_fresh_load(
    behaviour: Behaviour, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, named: bool
) -> None:
    """All ranks have the bits of a checkpoint of the new version, which arrive in several buckets,
    and the engine answers like the model. With the names of the manifest (`named`) it needs no
    conversion by transformers, which version 4 lacks."""
    monkeypatch.setattr(buckets, "MIB", 1 << 16)
    new = model_of(family, seed=1)
    model_of(family, seed=0).save_pretrained(tmp_path / "old")
    new.save_pretrained(tmp_path / "new")
    fresh = load_file(tmp_path / "new" / "model.safetensors")
    tensors = published(new)
    assert tensors.keys() != fresh.keys()
    if named:
        tensors = with_hub_names(new, tensors)
        monkeypatch.setitem(sys.modules, own_names.__name__, None)
    async with started(tmp_path / "old", Role.BOTH, tensor_parallel=2) as engine:
        await engine.load(tensors, version=1)
        for rank in core_of(engine).ranks:
            assert rank.stored.keys() == fresh.keys()
            assert all(torch.equal(one, fresh[name]) for name, one in rank.stored.items())
        ids = prompt_ids(20)
        assert (await both(engine).sample(ids)).ids == greedy_of(new, ids, 16)


def test_named_tensor_of_another_size_or_shape_is_refused(tmp_path: Path) -> None:
    """As every tensor, before a rank changes."""
    model = model_of("mixtral", seed=0)
    model.save_pretrained(tmp_path)
    tensors = with_hub_names(model, published(model))
    name, stack = next((name, one) for name, one in tensors.items() if ".experts." in name)
    short = replace(stack, data=memoryview(stack.data)[:-4])
    (first, *rest) = stack.hub
    turned = first._replace(shape=first.shape[::-1])
    for wrong in (short, replace(stack, hub=(turned, *rest))):
        with pytest.raises(UnfitWeights, match=r"weights 1: .*block_sparse_moe.experts.0"):
            read_checkpoint(str(tmp_path)).fit({**tensors, name: wrong}, version=1)


def test_names_without_a_way_to_the_hub_are_refused(tmp_path: Path) -> None:
    """The library would ignore them and keep its experts."""
    model = model_of("mixtral", seed=0)
    model.save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"mixtral"', '"unknown"'))
    with pytest.raises(UnfitWeights, match=r"other names than the checkpoint .* cannot build"):
        read_checkpoint(str(tmp_path)).fit(published(model), version=1)


def test_transformers_4_converts_no_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the names of the hub alone; the library's version 1.2.1 pins it."""
    model = model_of("mixtral", seed=0)
    model.save_pretrained(tmp_path)
    monkeypatch.setitem(sys.modules, own_names.__name__, None)
    with pytest.raises(UnfitWeights, match=r"nothing converts them: transformers \d.* cannot, 5"):
        read_checkpoint(str(tmp_path)).fit(published(model), version=1)
