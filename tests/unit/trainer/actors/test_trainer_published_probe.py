"""The probe of a publication: what its weights compute, for engines to compare with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from forge.rl.model.probe import own_logprobs
from services.inference.engines.base import Probe, UnfitWeights
from services.inference.engines.embedded.model.policy import Policy
from services.inference.engines.embedded.model.probe import adopt
from services.trainer.actors.learner import TakeSnapshot
from services.trainer.learner import publication_probe
from services.trainer.learner.publication_probe import EXACT_EVERY
from services.trainer.published.publisher import Snapshot
from services.trainer.setting_tables import LoraSettings
from tests.support.trainer.learners import started_learner, take_step

_AUTOCAST = {"float32": "none", "bfloat16": "bfloat16"}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lora_rank", [0, 2])
def test_engine_computes_the_probe_of_a_publication(
    model_path: Path, tmp_path: Path, dtype: str, lora_rank: int
) -> None:
    """In both types, by default that of the backbone, merged or with adapters; with other log-probs
    the weights are refused and those before stay."""
    lora = LoraSettings(rank=lora_rank)
    # The default publishes in the type of the backbone.
    settings = {"publish_dtype": dtype} if lora_rank else {"autocast": _AUTOCAST[dtype]}
    actor = started_learner(model_path, tmp_path, lora=lora, **settings)
    for _ in range(3 if lora_rank else 0):  # The first adapters add nothing.
        take_step(actor)
    snapshot: Snapshot = actor.receive(TakeSnapshot(step=1))
    assert snapshot.probe is not None
    assert {one.dtype for one in snapshot.tensors} == {dtype}
    probe = Probe(
        ids=tuple(snapshot.probe.ids),
        logprobs=tuple(snapshot.probe.logprobs),
        published=tuple(snapshot.probe.published),
    )
    assert bool(probe.published) == (dtype == "bfloat16")
    tensors = {one.name: one for one in snapshot.tensors}
    for served in {"float32", dtype}:
        engine = Policy.build(str(model_path), dtype=served, device="cpu")
        adopt(engine, engine.stage(tensors, version=1), probe)
        assert engine.version == 1
        wrong = replace(probe, logprobs=tuple(one - 1 for one in probe.logprobs))
        with pytest.raises(
            UnfitWeights, match=r"differ from the trainer's by (1|0\.9\d*|1\.0\d*) "
        ):
            adopt(engine, engine.stage(tensors, version=2), wrong)
        if probe.published:
            wrong = replace(probe, published=tuple(one - 1e-3 for one in probe.published))
            with pytest.raises(UnfitWeights, match=r"differ from the trainer's by 0\.001 "):
                adopt(engine, engine.stage(tensors, version=2), wrong)
        assert engine.version == 1
    # The model under training has its own values again.
    again: Snapshot = actor.receive(TakeSnapshot(step=1))
    assert again.probe is not None
    assert again.probe.logprobs == snapshot.probe.logprobs


def test_published_values_are_computed_seldom(model_path: Path, tmp_path: Path) -> None:
    """For the first publication of a process and every 16th after it."""
    actor = started_learner(model_path, tmp_path, autocast="bfloat16")
    probes = [actor.receive(TakeSnapshot(step=1)).probe for _ in range(EXACT_EVERY + 2)]
    assert [n for n, one in enumerate(probes) if one.published] == [0, EXACT_EVERY]


def test_probe_is_computed_without_tf32(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in a process that allows it, as in NVIDIA's containers: engines compare in float32."""
    found = []

    def noted(*given: Any) -> torch.Tensor:
        found.append(torch.get_float32_matmul_precision())
        return own_logprobs(*given)

    monkeypatch.setattr(publication_probe, "own_logprobs", noted)
    actor = started_learner(model_path, tmp_path, autocast="bfloat16")
    torch.set_float32_matmul_precision("high")
    try:
        actor.receive(TakeSnapshot(step=1))
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert found == ["highest", "highest"]
