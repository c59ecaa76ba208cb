"""Heads that draft, in the service: sent, saved, taken up again, and left aside by engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from forge.core.errors import InvalidArgument
from forge.core.named_tensor import NamedTensor as Received
from forge.rl.config import MtpConfig, OptimizerConfig
from services.inference.engines.embedded.model.policy import Policy
from services.trainer.actors.learner import LearnerActor, Restore, TakeSnapshot
from services.trainer.checkpoint.history import CheckpointHistory
from services.trainer.checkpoint.store import CheckpointStore
from services.trainer.learner.model_replica import Capture
from services.trainer.published.publisher import Snapshot
from services.trainer.reporting import step_metrics
from services.trainer.reporting.sinks import scalars
from services.trainer.samples.samples import BatchSamples
from tests.support.trainer.learners import started_learner, take_step
from tests.support.trainer.old_checkpoints import as_format_2, as_listed


def learner(model_path: Path, checkpoints: Path, **settings: Any) -> LearnerActor:
    optimizer = OptimizerConfig(learning_rate=1e-3)
    settings = {"optimizer": optimizer, "mtp": MtpConfig(heads=2), **settings}
    return started_learner(model_path, checkpoints, **settings)


def save(actor: LearnerActor, checkpoints: Path) -> Path:
    write = actor.receive(Capture()).write
    return CheckpointStore(checkpoints).save(
        write, step=1, weight_version=2, history=CheckpointHistory()
    )


def sent(actor: LearnerActor) -> dict[str, Received]:
    snapshot: Snapshot = actor.receive(TakeSnapshot(step=1))
    return {
        one.name: Received(name=one.name, dtype=one.dtype, shape=one.shape, data=bytes(one.data))
        for one in snapshot.tensors
    }


def test_draft_heads_are_sent_after_the_model_and_saved_beside_it(
    model_path: Path, tmp_path: Path
) -> None:
    """The same bytes both ways; the checkpoint still loads as the plain model."""
    actor = learner(model_path, tmp_path)
    take_step(actor)
    path = save(actor, tmp_path)
    saved, received = load_file(path / "mtp.safetensors"), sent(actor)
    names = list(received)
    assert names[-len(saved) :] == [name for name in names if name.startswith("mtp.")]
    assert set(saved) == set(names[-len(saved) :])
    for name, tensor in saved.items():
        assert tensor.numpy().tobytes() == received[name].data
    _, report = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not report["unexpected_keys"] and not report["missing_keys"]


def test_embedded_engine_ignores_draft_heads(model_path: Path, tmp_path: Path) -> None:
    """It stages weights with and without heads, and still refuses other unknown tensors."""
    weights = sent(learner(model_path, tmp_path))
    policy = Policy.build(str(model_path), dtype="float32", device="cpu", context_tokens=64)
    plain = {name: one for name, one in weights.items() if not name.startswith("mtp.")}
    staged, without = (policy.stage(each, version=1).tensors for each in (weights, plain))
    assert all(torch.equal(a, b) for a, b in zip(staged, without, strict=True))


@pytest.mark.parametrize("twice", [False, True])
def test_run_continues_with_its_draft_heads(model_path: Path, tmp_path: Path, twice: bool) -> None:
    """After a restore the next step is the same, with heads; also from a checkpoint of an earlier
    version, which has them in the learner's file too."""
    first = learner(model_path, tmp_path)
    take_step(first)
    path = save(first, tmp_path)
    state = torch.load(path / "learner.pt", weights_only=True)
    assert "heads" not in state["mtp"] and state["mtp"]["optimizer"]["state"]
    if twice:
        as_format_2(path)
        state = torch.load(path / "learner.pt", weights_only=True)
        heads = load_file(path / "mtp.safetensors")
        torch.save({**state, "mtp": {**state["mtp"], "heads": heads}}, path / "learner.pt")
        as_listed(path)
    second = learner(model_path, tmp_path)
    assert second.receive(Restore()) is not None
    results = [take_step(one) for one in (first, second)]
    assert results[0].mtp == results[1].mtp
    assert {n: t.data for n, t in sent(first).items()} == {
        n: t.data for n, t in sent(second).items()
    }


def test_new_run_starts_with_the_draft_heads_beside_its_model(
    model_path: Path, tmp_path: Path
) -> None:
    """A checkpoint as `model_path` has them; another number of heads is refused."""
    old = learner(model_path, tmp_path / "old")
    take_step(old)
    path = save(old, tmp_path / "old")
    heads = {n: t.data for n, t in sent(old).items() if n.startswith("mtp.")}
    fresh = sent(learner(path, tmp_path / "new"))
    assert heads == {name: one.data for name, one in fresh.items() if name.startswith("mtp.")}
    with pytest.raises(InvalidArgument, match=r"mtp\.1\."):
        learner(path, tmp_path / "other", mtp=MtpConfig(heads=1))


def test_draft_head_loss_and_acceptance_are_reported(model_path: Path, tmp_path: Path) -> None:
    """In the step's metrics, by head, also for the sinks."""
    batch = BatchSamples(
        samples=(), outcomes={"code": [1.0]}, groups=1, trajectories=1,
        flat_groups=0, excluded=0,
    )  # fmt: skip
    result = take_step(learner(model_path, tmp_path))
    times = step_metrics.StepTimes(step_s=1.0, wait_s=0.0, publish_s=0.0)
    told = step_metrics.step_metrics(
        step=1, weight_version=1, batch=batch, result=result, times=times, earlier=[]
    )
    assert set(told.mtp_acceptance) == {"1", "2"}
    assert all(0 < value < 1 for value in told.mtp_acceptance.values())
    assert told.mtp_loss == pytest.approx(sum(result.mtp.losses) / 2)
    assert scalars(told)["mtp_acceptance/2"] == told.mtp_acceptance["2"]
