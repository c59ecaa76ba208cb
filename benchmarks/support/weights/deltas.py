"""The size of deltas between the published bfloat16 weights of successive optimizer steps."""

from __future__ import annotations

import statistics
from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from forge.core.prefix_tree import Sample
from forge.rl.config import LearnerConfig, OptimizerConfig
from forge.rl.learner.learner import Learner
from forge.rl.model.policy import TreePolicy
from forge.runtime.weights.delta import encode
from services.inference.engines.tensor_bytes import to_named
from services.trainer.model.full_weights import own_tensors

_GROUPS = 2
_GROUP_SIZE = 4
ANSWER_TOKENS = 24


def delta_sizes(path: Path, *, learning_rate: float, steps: int) -> dict[str, float]:
    """Return the bytes of a delta over those of all weights (median, largest, last step), and the
    median share of changed elements.

    The model samples answers to sums, with random rewards: the size of an AdamW step depends on
    the learning rate, not on the task.
    """
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(path)
    policy = TreePolicy(model)
    learner = Learner(
        policy,
        LearnerConfig(optimizer=OptimizerConfig(learning_rate=learning_rate)),
    )
    rng = Random(0)
    sizes, shares = [], []
    before = _published(model)
    for _ in range(steps):
        with policy.attention.stock():
            samples = list(samples_of(model, tokenizer, rng))
        learner.step(learner.plan(samples), weight_version=1)
        after = _published(model)
        sizes.append(_delta_bytes(before, after) / sum(one.nbytes for one in after.values()))
        changed = sum(int((after[name] != before[name]).sum()) for name in after)
        shares.append(changed / sum(one.numel() for one in after.values()))
        before = after
    return {
        "over_full": statistics.median(sizes),
        "over_full_max": max(sizes),
        "over_full_last": sizes[-1],
        "changed": statistics.median(shares),
    }


def samples_of(model: Any, tokenizer: Any, rng: Random) -> Iterator[Sample]:
    """Answers of the model to sums, in groups."""
    for _ in range(_GROUPS):
        question = f"What is {rng.randrange(1000)} + {rng.randrange(1000)}?"
        messages = [{"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        prompt = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
        with torch.no_grad():
            ids_GT = model.generate(
                prompt.repeat(_GROUP_SIZE, 1),
                attention_mask=torch.ones_like(prompt).repeat(_GROUP_SIZE, 1),
                do_sample=True,
                top_k=0,
                top_p=1.0,
                temperature=1.0,
                min_new_tokens=ANSWER_TOKENS,
                max_new_tokens=ANSWER_TOKENS,
                pad_token_id=0,
            )
            logprobs_GTV = model(ids_GT).logits[:, :-1].log_softmax(-1)
        logprobs_GT = logprobs_GTV.gather(-1, ids_GT[:, 1:, None])[..., 0]
        start = prompt.shape[1]
        for ids_T, logprobs_T in zip(ids_GT, logprobs_GT, strict=True):
            yield Sample(
                ids=array("i", ids_T.tolist()).tobytes(),
                trained=((start, len(ids_T)),),
                behavior_logprobs=array("f", logprobs_T[start - 1 :].tolist()).tobytes(),
                weight_versions=bytes(4 * ANSWER_TOKENS),
                advantages=array("f", [rng.gauss(0, 1)] * ANSWER_TOKENS).tobytes(),
            )


def _published(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: one.detach().to(torch.bfloat16, copy=True) for name, one in own_tensors(model).items()
    }


def _delta_bytes(before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor]) -> int:
    total_bytes = 0
    for name, tensor in after.items():
        old, new = to_named(name, before[name]).data, to_named(name, tensor).data
        delta = encode(old, new, item_bytes=2)
        total_bytes += len(new if delta is None else delta)
    return total_bytes
