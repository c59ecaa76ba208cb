"""A learner of ranks that shard model and optimizer, and its checkpoints on other worlds."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from forge.rl.config import OptimizerConfig
from forge.rl.learner.batch_plan import plan_batch
from forge.rl.learner.types import StepResult
from services.trainer.actors.learner import LearnerActor, Restore, TakeSnapshot
from services.trainer.checkpoint.history import History
from services.trainer.config import LoraSettings, MeshSettings
from services.trainer.learner.model_replica import Capture, Take
from tests.support.rl.models import make_sample, tiny_model
from tests.support.trainer.learners import started_learner

pytestmark = pytest.mark.timeout(900)
LORA = LoraSettings(rank=2, alpha=8.0, targets=("q_proj", "down_proj"))


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a tied head."""
    path = tmp_path_factory.mktemp("model")
    tiny_model("llama", torch.float32).save_pretrained(path)
    return path


def learner(model_path: Path, checkpoints: Path, lora: int, **settings: Any) -> LearnerActor:
    adapters = {"lora": LORA} if lora else {}
    optimizer = OptimizerConfig(learning_rate=1e-3)
    return started_learner(model_path, checkpoints, optimizer=optimizer, **adapters, **settings)


def step(actor: LearnerActor, seed: int) -> StepResult:
    rng = Random(seed)
    samples = [
        make_sample([seed % 13, n % 13, *[rng.randrange(13) for _ in range(12)]], (4, 14), rng=rng)
        for n in range(8)
    ]
    plan = plan_batch(samples, token_budget=64, channels=16)
    result: StepResult = actor.receive(Take(plan=plan, weight_version=1))
    assert result.skipped == ""
    return result


def sent(actor: LearnerActor) -> dict[str, bytes]:
    return {one.name: bytes(one.data) for one in actor.receive(TakeSnapshot(step=1)).tensors}


def flat(value: Any) -> list[Any]:
    """Leaves of nested dicts and lists in order."""
    if isinstance(value, dict):
        return [leaf for key in sorted(value, key=str) for leaf in flat(value[key])]
    if isinstance(value, list | tuple):
        return [leaf for part in value for leaf in flat(part)]
    return [value]


def state(actor: LearnerActor) -> list[Any]:
    """All that a checkpoint holds."""
    contents = actor.receive(Capture())
    return flat([contents.model, contents.master, contents.learner])


def same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(
        torch.equal(mine, its) if isinstance(mine, torch.Tensor) else mine == its
        for mine, its in zip(one, other, strict=True)
    )


def save(actor: LearnerActor, number: int) -> None:
    actor._checkpoints.save(
        actor.receive(Capture()).write, step=number, weight_version=number, history=History()
    )


@pytest.mark.parametrize("lora", [0, 2])
def test_checkpoint_of_four_ranks_continues_on_one_and_two(
    model_path: Path, tmp_path: Path, lora: int
) -> None:
    """The ranks train like one process; weights, moments and random state are restored bit for bit
    in each world."""
    four = learner(model_path, tmp_path, lora, ranks=4, mesh=MeshSettings(dp_shard=2, cp=2))
    try:
        alone = learner(model_path, tmp_path / "alone", lora)
        for seed in range(2):
            one, shared = step(alone, seed), step(four, seed)
            assert shared.loss == pytest.approx(one.loss, rel=1e-5)
            assert shared.grad_norm == pytest.approx(one.grad_norm, rel=1e-5)
            assert shared.stats.entropy == pytest.approx(one.stats.entropy, rel=1e-5)
        expected = {
            name: torch.frombuffer(bytearray(one), dtype=torch.float32)
            for name, one in sent(alone).items()
        }
        published = sent(four)
        assert published.keys() == expected.keys()
        for name, data in published.items():
            found = torch.frombuffer(bytearray(data), dtype=torch.float32)
            assert torch.allclose(found, expected[name], atol=2e-5), name
        save(four, 1)
        kept = state(four)
    finally:
        four.stopped()
    single = learner(model_path, tmp_path, lora)
    assert single.receive(Restore()).step == 1
    assert same(state(single), kept) and sent(single) == published
    save(single, 2)
    two = learner(model_path, tmp_path, lora, ranks=2, mesh=MeshSettings(dp_shard=2))
    try:
        assert two.receive(Restore()).step == 2
        assert same(state(two), kept) and sent(two) == published
        after, again = step(two, 7), step(single, 7)
        assert after.loss == pytest.approx(again.loss, rel=1e-5)
    finally:
        two.stopped()
