"""Cost of kept keys and values: log-probs of an answer by new weights after a prompt that older
weights computed, against those after a prompt that the new weights computed."""

from __future__ import annotations

import copy
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.support.weights.deltas import ANSWER_TOKENS, samples_of
from forge.core.prefix_tree import Sample
from forge.core.token_columns import int32_array
from forge.rl.config import LearnerConfig, OptimizerConfig
from forge.rl.learner.learner import Learner
from forge.rl.model.policy import TreePolicy


def keep_gap(path: Path, *, learning_rate: float, steps: int, batches: int) -> dict[str, float]:
    """Return the mean and the 99th percentile of |difference of log-probs|, in nats: of kept keys
    and values (`kept`), and of the two policies themselves (`policies`)."""
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(path)
    policy = TreePolicy(model)
    optimizer = OptimizerConfig(learning_rate=learning_rate)
    learner = Learner(policy, LearnerConfig(optimizer=optimizer))
    rng = Random(0)
    with policy.attention.stock():
        old: Any = copy.deepcopy(model)
        recorded = [one for _ in range(batches) for one in samples_of(model, tokenizer, rng)]
    for _ in range(steps):
        with policy.attention.stock():
            batch = list(samples_of(model, tokenizer, rng))
        learner.step(learner.plan(batch), weight_version=1)
    with policy.attention.stock(), torch.no_grad():
        found = [_gaps(old, model, one) for one in recorded]
    kept, policies = (torch.cat(one) for one in zip(*found, strict=True))
    return {
        "kept_mean": kept.mean().item(),
        "kept_p99": kept.quantile(0.99).item(),
        "policies_mean": policies.mean().item(),
        "policies_p99": policies.quantile(0.99).item(),
    }


def _gaps(old: Any, new: Any, sample: Sample) -> tuple[Tensor, Tensor]:
    """For each token of the answer but the first, which the prompt's reader samples."""
    ids = torch.tensor([list(int32_array(sample.ids))])
    start = ids.shape[1] - ANSWER_TOKENS
    prompt, answer = ids[:, :start], ids[:, start:]
    past = old(prompt, use_cache=True).past_key_values
    mixed = _logprobs(new(answer, past_key_values=past).logits, answer)
    own, before = (_logprobs(one(ids).logits[:, start:], answer) for one in (new, old))
    return (mixed - own).abs(), (before - own).abs()


def _logprobs(logits: Tensor, answer: Tensor) -> Tensor:
    chosen = logits[:, :-1].log_softmax(-1).gather(-1, answer[:, 1:, None])
    return chosen[0, :, 0]
