"""Forge's objectives on merged trees equal TRL's on padded batches.

TRL's own `_compute_loss` and its own log-probs run here (`benchmarks.support.training.trl_peer`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.support.training.trl_peer import HAS_TRL, bare_trainer, fuse_head
from forge.core.prefix_tree import Sample
from forge.core.token_columns import float32_bytes, int32_bytes
from forge.rl.config import Correction, LearnerConfig, ObjectiveConfig
from forge.rl.learner.learner import Learner
from forge.rl.model.policy import TreePolicy
from tests.support.rl.models import gradients, tiny_model

pytestmark = pytest.mark.skipif(not HAS_TRL, reason="TRL is not installed (extra: trl)")

PROMPT = [5, 3, 8, 1, 7]
ANSWERS = [[1, 2, 3], [1, 2, 3, 4, 5], [1, 2, 9], [1, 2, 3], [7], [1, 2, 3, 4, 6, 2]]
ADVANTAGES = [1.0, -0.7, 0.4, -1.2, 0.9, -0.3]
LENGTH = 6
BOUNDS = {"clip_low": 0.2, "clip_high": 0.28}
TRL_BOUNDS = {"epsilon": 0.2, "epsilon_high": 0.28}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """The same objective in both words."""

    forge: dict[str, Any]
    trl: dict[str, Any]
    correction: Correction = Correction()  # noqa: RUF009
    capped: float = 0.0
    """Cap of the weights between TRL's old and sampling log-probs; 0: none."""
    shift: float = 0.4
    """How far behavior log-probs are from the policy's, at most."""
    reference: bool = field(default=False)


CASES = {
    "grpo": Case(forge={"algorithm": "grpo", **BOUNDS}, trl={"loss_type": "grpo", **TRL_BOUNDS}),
    "dr_grpo": Case(
        forge={"algorithm": "dr_grpo", "normalization_tokens": LENGTH, **BOUNDS},
        trl={"loss_type": "dr_grpo", **TRL_BOUNDS},
    ),
    "dapo": Case(forge={"algorithm": "dapo"}, trl={"loss_type": "dapo", **TRL_BOUNDS}),
    "ppo_clip": Case(
        forge={"algorithm": "ppo_clip", **BOUNDS}, trl={"loss_type": "bnpo", **TRL_BOUNDS}
    ),
    "dual_clip": Case(
        forge={"algorithm": "dapo", "dual_clip": 1.3},
        trl={"loss_type": "dapo", "delta": 1.3, **TRL_BOUNDS},
    ),
    "gspo": Case(
        forge={"algorithm": "gspo", "clip_low": 0.1, "clip_high": 0.1},
        trl={
            "loss_type": "grpo", "importance_sampling_level": "sequence",
            "epsilon": 0.1, "epsilon_high": 0.1,
        },
    ),
    "cispo": Case(
        forge={"algorithm": "cispo", "ratio_cap": 1.2},
        trl={"loss_type": "cispo", "epsilon_high": 1.2},
    ),
    "sapo": Case(
        forge={"algorithm": "examples.custom_loss:sapo", "normalization": "sequence"},
        trl={"loss_type": "sapo", "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05},
    ),
    "kl_k3": Case(
        forge={"algorithm": "dapo", "kl_coef": 0.3, "kl_estimator": "k3"},
        # TRL weighs its k3 by the ratio unless told not to.
        trl={"loss_type": "dapo", "beta": 0.3, "use_bias_correction_kl": False, **TRL_BOUNDS},
        reference=True,
    ),
    "truncated_importance_sampling": Case(
        forge={"algorithm": "dapo", "old_logprobs": "recomputed"},
        correction=Correction(weight_cap=1.2),
        trl={"loss_type": "dapo", **TRL_BOUNDS},
        capped=1.2,
    ),
    "off_policy_mask": Case(
        forge={"algorithm": "grpo", **BOUNDS},
        correction=Correction(mask_kl_max=0.05),
        trl={"loss_type": "grpo", "off_policy_mask_threshold": 0.05, **TRL_BOUNDS},
    ),
    "rloo": Case(
        forge={"algorithm": "rloo", **BOUNDS}, trl={"trainer": "rloo", **TRL_BOUNDS}, shift=0.15
    ),
}  # fmt: skip


def padded(rows: list[list[float]], filler: float = 0.0) -> Tensor:
    return torch.tensor([row + [filler] * (LENGTH - len(row)) for row in rows])


MASK = padded([[1.0] * len(answer) for answer in ANSWERS])


def policy_logprobs(model: Any) -> list[list[float]]:
    """Of the answers, one at a time, through the model's stock attention."""
    rows = []
    with torch.no_grad():
        for answer in ANSWERS:
            ids_L = torch.tensor(PROMPT + answer)
            logits_LV = model(input_ids=ids_L[None], use_cache=False).logits[0]
            places_T = torch.arange(len(PROMPT) - 1, len(ids_L) - 1)
            rows.append(logits_LV.log_softmax(-1)[places_T, ids_L[places_T + 1]].tolist())
    return rows


def moved(rows: list[list[float]], shift: float) -> list[list[float]]:
    rng = Random(2)
    return [[value + rng.uniform(-shift, shift) for value in row] for row in rows]


def perturbed() -> Any:
    """The reference: the tiny model, a little elsewhere."""
    model = tiny_model("qwen3", torch.float32)
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            parameter.mul_(1.0 + 0.05 * (-1) ** index)
    return model.requires_grad_(False)


def of_forge(case: Case, behavior: list[list[float]]) -> tuple[float, dict[str, Tensor]]:
    samples = [
        Sample(
            ids=int32_bytes(PROMPT + answer),
            trained=((len(PROMPT), len(PROMPT) + len(answer)),),
            behavior_logprobs=float32_bytes(logprobs),
            weight_versions=int32_bytes([0] * len(answer)),
            advantages=float32_bytes([advantage] * len(answer)),
        )
        for answer, logprobs, advantage in zip(ANSWERS, behavior, ADVANTAGES, strict=True)
    ]
    model = tiny_model("qwen3", torch.float32)
    config = LearnerConfig(objective=ObjectiveConfig(**case.forge), correction=case.correction)
    reference = TreePolicy(perturbed()) if case.reference else None
    learner = Learner(TreePolicy(model), config, reference=reference)
    plan = learner.plan(samples)
    assert plan.tree_tokens < plan.sample_tokens, "nothing was merged"
    loss, _ = learner.accumulate(plan)
    return loss, gradients(model)


def trl_trainer(case: Case, model: Any, folder: Path) -> Any:
    options = dict(case.trl)
    rloo = options.pop("trainer", "grpo") == "rloo"
    trainer = bare_trainer(
        model, folder, options=options, answers=len(ANSWERS), longest=LENGTH, rloo=rloo
    )
    trainer.use_vllm = trainer.vllm_importance_sampling_correction = case.capped > 0
    return trainer


def of_trl(
    case: Case, behavior: list[list[float]], folder: Path
) -> tuple[float, dict[str, Tensor]]:
    model = tiny_model("qwen3", torch.float32).train()
    own = padded(policy_logprobs(model))
    fuse_head(model)
    sampling = padded(behavior)
    inputs = {
        "prompt_ids": torch.tensor([PROMPT] * len(ANSWERS)),
        "prompt_mask": torch.ones(len(ANSWERS), len(PROMPT), dtype=torch.long),
        "completion_ids": padded([[float(token) for token in one] for one in ANSWERS]).long(),
        "completion_mask": MASK.long(),
        "advantages": torch.tensor(ADVANTAGES),
        "old_per_token_logps": own if case.capped else sampling,
        "old_logps": (sampling * MASK).sum(1),
        "num_items_in_batch": MASK.sum(),
    }
    if case.capped:
        inputs["importance_sampling_ratio"] = ((own - sampling) * MASK).exp().clamp(max=case.capped)
    if case.reference:
        inputs["ref_per_token_logps"] = padded(policy_logprobs(perturbed()))
    loss = trl_trainer(case, model, folder)._compute_loss(model, inputs)
    loss.backward()
    return float(loss.detach()), gradients(model)


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_equal_those_of_trl(name: str, tmp_path: Path) -> None:
    """In fp32, as TRL's head computes: the loss to 5e-7, every gradient to 3e-6 of the largest."""
    case = CASES[name]
    behavior = moved(policy_logprobs(tiny_model("qwen3", torch.float32)), case.shift)
    loss, found = of_forge(case, behavior)
    expected_loss, expected = of_trl(case, behavior, tmp_path)
    largest = max(float(one.norm()) for one in expected.values())
    assert largest > 0
    assert loss == pytest.approx(expected_loss, rel=0, abs=5e-7)
    for parameter, gradient in expected.items():
        assert float((found[parameter] - gradient).norm()) <= 3e-6 * largest, parameter
