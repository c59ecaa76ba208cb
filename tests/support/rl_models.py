"""Tiny transformers models, samples for them, and the unmerged way to train on those.

The reference here is the definition of correct: one sample at a time, the model's own code, its
stock attention, and the loss written out by hand.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.models.llama import modeling_llama
from transformers.models.qwen3 import modeling_qwen3

from forge.core.packing import Sample, Span

VOCABULARY = 13
CAP = 1.5


def tiny_model(family: str, dtype: torch.dtype) -> Any:
    """Two layers, grouped-query attention, untied (Qwen3) or tied (Llama) head."""
    torch.manual_seed(0)
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.3,
    }
    if family == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**shape, head_dim=8)).to(dtype)
    return LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=True)).to(dtype)


@contextmanager
def wide_norms() -> Iterator[None]:
    """RMSNorm in the parameters' own type: transformers' fp32 upcast would hide fp64 errors."""

    def forward(self: Any, hidden: Tensor) -> Tensor:
        variance = hidden.pow(2).mean(-1, keepdim=True)
        normed: Tensor = self.weight * hidden * torch.rsqrt(variance + self.variance_epsilon)
        return normed

    with pytest.MonkeyPatch.context() as patch:
        for norm in (modeling_qwen3.Qwen3RMSNorm, modeling_llama.LlamaRMSNorm):
            patch.setattr(norm, "forward", forward)
        yield


def make_sample(
    ids: Sequence[int], *trained: Span, rng: Random, temperature: float = 1.0
) -> Sample:
    """Random behavior log-probs and advantages: every token weighs differently."""
    count = sum(end - start for start, end in trained)
    return Sample(
        ids=array("i", ids).tobytes(),
        trained=trained,
        behavior_logprobs=array("f", [rng.uniform(-4, -1) for _ in range(count)]).tobytes(),
        weight_versions=array("i", [rng.randrange(5) for _ in range(count)]).tobytes(),
        advantages=array("f", [rng.uniform(-1, 1) for _ in range(count)]).tobytes(),
        temperature=temperature,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradient:
    """A loss with the gradient of every parameter, and the size of what was added up for them."""

    loss: float
    of: dict[str, Tensor]
    loss_scale: float = 0.0
    scale: dict[str, float] = field(default_factory=dict)
    """Per parameter, the summed norms of the samples' gradients: what rounding is relative to."""


def reference_gradient(model: Any, samples: Sequence[Sample]) -> Gradient:
    """CISPO's token mean, one sample at a time, through the model's stock attention."""
    # The eager attention takes its softmax in fp32 whatever the type of the model.
    model.set_attn_implementation("sdpa")
    normalizer = sum(sample.trained_tokens for sample in samples)
    total: dict[str, Tensor] = {}
    scale: dict[str, float] = {}
    loss = loss_scale = 0.0
    for sample in samples:
        one = _sample_loss(model, sample) / normalizer
        model.zero_grad()
        one.backward()  # type: ignore[no-untyped-call]
        loss += float(one.detach())
        loss_scale += abs(float(one.detach()))
        for name, gradient in gradients(model).items():
            total[name] = total.get(name, torch.zeros_like(gradient)) + gradient
            scale[name] = scale.get(name, 0.0) + float(gradient.norm())
    return Gradient(loss=loss, of=total, loss_scale=loss_scale, scale=scale)


def _sample_loss(model: Any, sample: Sample) -> Tensor:
    """The sum over the sample's trained tokens, written out."""
    ids_L = torch.tensor(array("i", sample.ids))
    places_T = torch.cat([torch.arange(*span) for span in sample.trained])
    behavior_T, advantages_T = (
        torch.tensor(array("f", column)) for column in (sample.behavior_logprobs, sample.advantages)
    )
    logits_LV = model(input_ids=ids_L[None], use_cache=False).logits[0]
    all_LV = (logits_LV / sample.temperature).log_softmax(-1)
    logprobs_T: Tensor = all_LV[places_T - 1, ids_L[places_T]]
    ratio_T = (logprobs_T.detach() - behavior_T).exp()
    return -(torch.clamp(ratio_T, 0, CAP) * advantages_T * logprobs_T).sum()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """A copy of every parameter's gradient."""
    return {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def relative_errors(actual: Gradient, expected: Gradient) -> tuple[float, float]:
    """Of the loss, and the largest of any parameter's gradient.

    A gradient that is zero but for rounding is measured against a thousandth of the largest.
    """
    assert actual.of.keys() == expected.of.keys()
    floor = 1e-3 * max(expected.scale.values())
    loss_error = abs(actual.loss - expected.loss) / expected.loss_scale
    return loss_error, max(
        float((actual.of[name] - expected.of[name]).norm()) / max(expected.scale[name], floor)
        for name in expected.of
    )
