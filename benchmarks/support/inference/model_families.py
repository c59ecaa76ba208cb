"""Families of transformers models as small models, and training on them against plain forwards.

A family is a model type of transformers' mapping for causal language models, with its default
configuration or a variant of it, shrunken by `forge.rl.model.small_config`: windows and thresholds
of position are a few tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from forge.core.errors import InvalidArgument
from forge.core.prefix_tree import Sample
from forge.rl.config import LearnerConfig, ObjectiveConfig
from forge.rl.learner.learner import Learner
from forge.rl.model.capabilities import one_line
from forge.rl.model.policy import TreePolicy
from forge.rl.model.probe import (
    TOLERANCE,
    check_policy,
    gradients_of,
    own_logprobs,
    randomize,
    relative_error,
)
from forge.rl.model.small_config import THRESHOLD, WINDOW, small_config

SEED = 11
ROPE = {"rope_theta": 10000.0}
LONG_FACTORS = {"short_factor": [1.0] * 64, "long_factor": [4.0] * 64}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One line of the table."""

    name: str
    model_type: str
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of its configuration, beyond the defaults."""
    small: dict[str, Any] = field(default_factory=dict)
    """Set on the shrunken configuration of the language model."""

    def config(self) -> Any:
        """Its configuration, in full size. Raises whatever transformers does."""
        return CONFIG_MAPPING[self.model_type](**self.settings)


NEEDED: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "reformer": {"is_decoder": True},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 16, "num_hidden_layers": 32},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16, "num_hidden_layers": 32},
    "cohere_compass_text": {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", **ROPE},
            "sliding_attention": {"rope_type": "default", **ROPE},
        }
    },
}
"""Settings without which the default configuration makes no model."""
_LAYERS = ["sliding_attention", "full_attention"] * 12
VARIANTS = (
    Family(
        name="llama, dynamic rotary",
        model_type="llama",
        settings={"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, **ROPE}},
    ),
    Family(
        name="llama, yarn rotary",
        model_type="llama",
        settings={
            "rope_parameters": {
                "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, **ROPE
            }
        },
    ),
    Family(
        name="llama, llama3 rotary",
        model_type="llama",
        settings={
            "rope_parameters": {
                "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 512, **ROPE,
            }
        },
    ),
    Family(
        name="phi3, longrope rotary",
        model_type="phi3",
        settings={
            "max_position_embeddings": 16384,
            "original_max_position_embeddings": 4096,
            "rope_parameters": {
                "rope_type": "longrope", "original_max_position_embeddings": 4096,
                "short_factor": [1.0] * 48, "long_factor": [4.0] * 48, **ROPE,
            },
        },
    ),
    Family(
        name="qwen2_moe, windows",
        model_type="qwen2_moe",
        settings={"use_sliding_window": True, "max_window_layers": 12},
    ),
    Family(
        name="qwen2, windows",
        model_type="qwen2",
        settings={"use_sliding_window": True, "max_window_layers": 16},
    ),
    Family(
        name="qwen3_moe, windows",
        model_type="qwen3_moe",
        settings={"use_sliding_window": True, "max_window_layers": 12},
    ),
    Family(name="phimoe, windows", model_type="phimoe", settings={"sliding_window": 2047}),
    Family(name="phi3, windows", model_type="phi3", settings={"sliding_window": 2047}),
    Family(name="mixtral, windows", model_type="mixtral", settings={"sliding_window": 4096}),
    Family(
        name="llama4_text, full attention",
        model_type="llama4_text",
        settings={"layer_types": ["full_attention"] * 48},
    ),
    Family(
        name="gemma2, no attention cap",
        model_type="gemma2",
        settings={"attn_logit_softcapping": None},
    ),
    Family(
        name="lfm2, convolutions",
        model_type="lfm2",
        settings={"full_attn_idxs": [0, 2, 4, 6], "layer_types": None},
    ),
    Family(name="bert, decoder", model_type="bert", settings={"is_decoder": True}),
    Family(name="roberta, decoder", model_type="roberta", settings={"is_decoder": True}),
)  # fmt: skip
QUICK = (
    "llama", "llama, dynamic rotary", "phi3, longrope rotary", "doge", "qwen2_moe, windows",
    "phimoe, windows", "nanochat", "gemma3n_text", "llama4_text", "llama4_text, full attention",
    "qwen3", "gemma3_text", "mixtral", "gpt2", "mamba", "deepseek_v3", "gpt_oss", "bert", "phi",
)  # fmt: skip


def families() -> list[Family]:
    """All of this version of transformers, by default configuration, and the variants."""
    plain = [
        Family(name=one, model_type=one, settings=NEEDED.get(one, {}))
        for one in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    ]
    return sorted([*plain, *VARIANTS], key=lambda one: one.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Way of training of a family, and its exactness."""

    way: str
    """merged, by sequence, alone, refused, or not built."""
    reason: str = ""
    errors: tuple[float, ...] = ()
    """Errors of the loss and of the gradients: within every window, and beyond."""
    exact: bool = True


def examine(family: Family) -> Finding:
    """Train on a small model of a family, and compare with plain forwards."""
    try:
        model = build(family)
    except Exception as error:
        return Finding(way="not built", reason=one_line(error))
    try:
        policy = TreePolicy(model)
        check_policy(policy)
    except InvalidArgument as refusal:
        return Finding(way="refused", reason=str(refusal))
    except Exception as error:  # a check that raises anything else is a defect
        return Finding(way="failed", reason=one_line(error), exact=False)
    way = "merged"
    if policy.unmerged:
        way = "alone" if policy.way.separate else "by sequence"
    try:
        errors = (*errors_of(policy, short_samples(model)), *errors_of(policy, deep_samples(model)))
    except Exception as error:
        return Finding(way="failed", reason=f"{way}: {one_line(error)}", exact=False)
    exact = all(one <= TOLERANCE[model.dtype] for one in errors)
    return Finding(way=way, reason=policy.unmerged, errors=errors, exact=exact)


def build(family: Family) -> Any:
    """A small model with large random weights, in fp64, or in fp32 where its code is.

    Raises whatever transformers does.
    """
    config = small_config(family.config())
    for name, value in family.small.items():
        setattr(config.get_text_config(decoder=True), name, value)
    torch.manual_seed(SEED)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    randomize(model)
    if hasattr(model.config, "_experts_implementation"):
        model.set_experts_implementation("eager")  # grouped kernels take no fp64
    model.to(torch.float64)
    for name, buffer in model.named_buffers():
        if name.endswith("inv_freq"):  # some releases of transformers multiply it by fp32 positions
            buffer.data = buffer.to(torch.float32)
    longest = deep_samples(model)[0]
    try:
        own_logprobs(model, longest)
    except RuntimeError:
        model.to(torch.float32)
        own_logprobs(model, longest)
    return model


def errors_of(policy: TreePolicy, samples: Sequence[Sample]) -> tuple[float, float]:
    """Relative errors of loss and gradients of a learner's pass, the larger of a whole and a cut
    batch, against each sample alone through the model's stock forward."""
    objective = ObjectiveConfig(algorithm="reinforce")
    learner = Learner(policy, LearnerConfig(objective=objective))
    policy.model.zero_grad()
    tokens = sum(one.trained_tokens for one in samples)
    total = scale = 0.0
    with policy.attention.stock():
        for one in samples:
            loss, size = _plain_loss(policy.model, one)
            (loss / tokens).backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach()) / tokens
            scale += size / tokens
        expected = gradients_of(policy.model)
    found = []
    for budget in (1 << 30, 24):
        loss_found, _ = learner.accumulate(learner.plan(samples, token_budget=budget))
        error = abs(loss_found - total) / scale
        found.append((error, relative_error(gradients_of(policy.model), expected)))
    loss_error, gradient_error = torch.tensor(found, dtype=torch.float64).amax(0).tolist()
    return loss_error, gradient_error


def _plain_loss(model: Any, sample: Sample) -> tuple[Tensor, float]:
    """Negative advantage-weighted log-likelihood, and the sum of its terms taken absolute."""
    logprobs_L = own_logprobs(model, sample)
    places = torch.cat([torch.arange(*span) for span in sample.trained])
    weights_T = torch.tensor(array("f", sample.advantages), dtype=logprobs_L.dtype)
    terms_T = weights_T * logprobs_L[places - 1]
    return -terms_T.sum(), float(terms_T.detach().abs().sum())


def short_samples(model: Any) -> list[Sample]:
    """A tree shorter than every window."""
    return _samples(model, prompt=2, answers=(2, 3, 1), length=WINDOW - 1)


def deep_samples(model: Any) -> list[Sample]:
    """A tree beyond every window and threshold."""
    return _samples(model, prompt=THRESHOLD + 7, answers=(30, 11, 4), length=60)


def _samples(model: Any, *, prompt: int, answers: Sequence[int], length: int) -> list[Sample]:
    """Answers to one prompt, a continuation of the first, its beginning, and another prompt."""
    vocabulary = model.get_input_embeddings().weight.shape[0]
    rng = Random(SEED)

    def ids(count: int) -> list[int]:
        return [rng.randrange(3, min(vocabulary, 20) - 4) for _ in range(count)]

    common = ids(prompt)
    branches = [common + ids(count) for count in answers]
    first = branches[0]
    branches += [first + ids(2), first[: prompt + 1], common[: prompt // 2] + ids(prompt)]
    return [_sample(one[:length], max(1, min(prompt, len(one) - 1)), rng) for one in branches]


def _sample(ids: list[int], begin: int, rng: Random) -> Sample:
    count = len(ids) - begin
    return Sample(
        ids=array("i", ids).tobytes(),
        trained=((begin, len(ids)),),
        behavior_logprobs=bytes(4 * count),
        weight_versions=bytes(4 * count),
        advantages=array("f", [rng.uniform(-1, 1) for _ in range(count)]).tobytes(),
    )
