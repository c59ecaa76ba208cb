"""Moments of 8 bits that ranks divide, against those of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from forge.rl.config import OptimizerConfig
from services.trainer.actors.learner import LearnerActor, Restore
from services.trainer.mesh import MeshSettings
from tests.ranks.test_sharded_learner import same, save, sent, step, stored
from tests.support.rl.moments import MESHES
from tests.support.rl.torchrun import torchrun
from tests.support.trainer.learners import started_learner

pytest.importorskip("bitsandbytes")
pytestmark = pytest.mark.timeout(900)


@pytest.mark.parametrize("mesh", [(ranks, mesh) for ranks in MESHES for mesh in MESHES[ranks]])
def test_steps_on_ranks_are_those_of_one_process(mesh: tuple[int, str]) -> None:
    """Bit for bit where rows are whole blocks; other matrices have AdamW's moments. Each continues
    from the other's state."""
    ranks, name = mesh
    found = torchrun(ranks, "tests.support.rl.moments", name)
    assert found[f"{name} whole blocks"] == 0
    assert found[f"{name} continued alone"] == 0
    assert found[f"{name} split blocks"] < 1e-6
    assert found[f"{name} continued on ranks"] < 1e-6
    assert 0.85 < found[f"{name} narrow"] < 0.9


def test_checkpoint_of_moments_continues_on_any_mesh(tmp_path: Path) -> None:
    """Codes and scales are restored bit for bit, from the shards of four ranks on one and two."""
    model_path = tmp_path / "model"
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=13,
    )
    LlamaForCausalLM(config).save_pretrained(model_path)

    def learner(folder: str = ".", **settings: Any) -> LearnerActor:
        optimizer = OptimizerConfig(name="adamw_8bit", learning_rate=1e-3)
        return started_learner(model_path, tmp_path / folder, optimizer=optimizer, **settings)

    four = learner(ranks=4, mesh=MeshSettings(dp_shard=2, cp=2))
    try:
        alone = learner("alone")
        one, shared = step(alone, 0), step(four, 0)
        assert shared.loss == pytest.approx(one.loss, rel=1e-5)
        path = save(four, 1)
        kept, published = contents(path), sent(four)
    finally:
        four.stopped()
    moments = [one for name, one in kept.items() if name.endswith(("state1", "state2"))]
    assert sum(one.dtype == torch.uint8 for one in moments) == 2 * 7
    single = learner()
    assert single.receive(Restore()).step == 1
    assert same(sent(single), published)
    assert same(contents(save(single, 2)), kept)
    two = learner(ranks=2, mesh=MeshSettings(dp_shard=2))
    try:
        assert two.receive(Restore()).step == 2
        assert same(contents(save(two, 3)), kept)
        assert step(two, 7).loss == pytest.approx(step(single, 7).loss, rel=1e-5)
    finally:
        two.stopped()


def contents(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint; one process keeps scales in one dimension."""
    found = stored(path, 0)
    return {name: one.flatten() if "absmax" in name else one for name, one in found.items()}
