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
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    FalconH1Config,
    FalconH1ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)
from transformers.models.deepseek_v3 import modeling_deepseek_v3
from transformers.models.glm4_moe_lite import modeling_glm4_moe_lite
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.llama import modeling_llama
from transformers.models.mistral import modeling_mistral
from transformers.models.mixtral import modeling_mixtral
from transformers.models.qwen3 import modeling_qwen3
from transformers.models.qwen3_moe import modeling_qwen3_moe

from forge.core.prefix_tree import Sample, Span
from tests.support.rl.further_models import further_model

VOCABULARY = 13
CAP = 1.5


SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 8}
WINDOW = 5
"""Shorter than most sequences of the tests."""
WIDE_WINDOW = 90
"""That of wide models, whose sequences have hundreds of tokens."""


def other_model(dtype: torch.dtype) -> Any:
    """A llama of other sizes and weights, with the same vocabulary."""
    torch.manual_seed(7)
    sizes = {"hidden_size": 24, "num_hidden_layers": 1, "num_key_value_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**(SHAPE | sizes)))
    return model.to(dtype).requires_grad_(False)


def tiny_model(family: str, dtype: torch.dtype, *, wide: bool = False, kv_heads: int = 2) -> Any:
    """Two layers, grouped-query attention, an untied or a tied head. Heads of a `wide` model are
    large enough for FlexAttention."""
    torch.manual_seed(0)
    shape = SHAPE | {"num_key_value_heads": kv_heads}
    size, window = (32, WIDE_WINDOW) if wide else (8, WINDOW)
    heads = {"head_dim": size} if wide else {}
    match family:
        case "qwen3":
            model: Any = Qwen3ForCausalLM(Qwen3Config(**shape, head_dim=size))
        case "llama":
            model = LlamaForCausalLM(LlamaConfig(**shape, **heads, tie_word_embeddings=True))
        case "qwen3_moe":
            moe = Qwen3MoeConfig(**shape, **EXPERTS, head_dim=size, num_experts=4)
            model = Qwen3MoeForCausalLM(moe)
        case "mixtral":
            model = MixtralForCausalLM(MixtralConfig(**shape, **heads, num_local_experts=4))
        case "mistral":  # every layer sees a window
            mistral = MistralConfig(**shape, **heads, sliding_window=window)
            model = MistralForCausalLM(mistral)
        case "gemma3":  # one layer sees a window, one everything
            layers = ["sliding_attention", "full_attention"]
            gemma = Gemma3TextConfig(
                **shape,
                head_dim=size,
                sliding_window=window,
                layer_types=layers,
                pad_token_id=None,
            )
            model = Gemma3ForCausalLM(gemma)
        case "gemma2":  # caps of scores and logits, far below both
            layers = ["sliding_attention", "full_attention"]
            caps = {"attn_logit_softcapping": 0.7, "final_logit_softcapping": 0.9}
            gemma2 = Gemma2Config(
                **shape, **caps, head_dim=size, sliding_window=window, layer_types=layers
            )
            model = Gemma2ForCausalLM(gemma2)
        case "gpt_oss":  # sinks, windows, experts
            layers = ["sliding_attention", "full_attention"]
            gpt = GptOssConfig(
                **shape,
                head_dim=size,
                sliding_window=window,
                layer_types=layers,
                num_local_experts=4,
                num_experts_per_tok=2,
                pad_token_id=None,
            )
            model = GptOssForCausalLM(gpt)
        case "deepseek_v3":  # values narrower than keys
            latent = {"q_lora_rank": 8, "kv_lora_rank": 8, "v_head_dim": 16 if wide else 6}
            parts = {"qk_rope_head_dim": 4, "qk_nope_head_dim": 20 if wide else 8}
            groups = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1}
            model = DeepseekV3ForCausalLM(
                DeepseekV3Config(
                    **{**shape, **EXPERTS, **latent, **parts, **groups, "num_key_value_heads": 4},
                    first_k_dense_replace=1,
                )
            )
        case "glm4_moe_lite" | "llama4" | "mamba" | "minimax" | "phi3":
            model = further_model(family, shape, EXPERTS, heads=heads, window=WINDOW)
        case "falcon_h1":  # attention beside Mamba 2 in each layer
            falcon = FalconH1Config(
                **shape,
                **heads,
                mamba_d_ssm=16,
                mamba_n_heads=4,
                mamba_d_head=4,
                mamba_n_groups=1,
                mamba_d_state=8,
                mamba_chunk_size=4,
            )
            model = FalconH1ForCausalLM(falcon)
        case _:
            assert family == "qwen3_next"  # linear attention beside full, and experts
            hybrid = Qwen3NextConfig(
                **shape,
                **EXPERTS,
                head_dim=size,
                num_experts=4,
                shared_expert_intermediate_size=8,
                linear_key_head_dim=8,
                linear_value_head_dim=8,
                linear_num_key_heads=2,
                linear_num_value_heads=4,
                layer_types=["linear_attention", "full_attention"],
            )
            model = Qwen3NextForCausalLM(hybrid)
    if hasattr(model.config, "_experts_implementation"):
        model.set_experts_implementation("eager")  # grouped kernels take no fp64
    model.to(dtype)
    for name, buffer in model.named_buffers():
        if name.endswith("inv_freq"):  # some releases of transformers multiply it by fp32 positions
            buffer.data = buffer.to(torch.float32)
    return model


@contextmanager
def wide_norms() -> Iterator[None]:
    """Norms and routers in the parameters' own type: transformers' fp32 would hide fp64 errors."""

    def forward(self: Any, hidden: Tensor) -> Tensor:
        variance = hidden.pow(2).mean(-1, keepdim=True)
        normed: Tensor = self.weight * hidden * torch.rsqrt(variance + self.variance_epsilon)
        return normed

    narrow, retyped, moved = Tensor.float, Tensor.type, Tensor.to
    softmax = nn.functional.softmax

    def as_wide(self: Tensor) -> Tensor:
        return self if self.dtype == torch.float64 else narrow(self)

    def retyped_wide(self: Tensor, *types: Any) -> Any:
        return self if self.dtype == torch.float64 else retyped(self, *types)

    def moved_wide(self: Tensor, *places: Any, **options: Any) -> Tensor:
        if self.dtype == torch.float64:
            wide = {torch.float32: torch.float64}
            places = tuple(
                wide.get(one, one) if isinstance(one, torch.dtype) else one for one in places
            )
            options = {
                name: wide.get(one, one) if name == "dtype" else one
                for name, one in options.items()
            }
        return moved(self, *places, **options)

    def wide_softmax(scores: Tensor, *places: Any, **options: Any) -> Tensor:
        if scores.dtype == torch.float64:
            options.pop("dtype", None)
        return softmax(scores, *places, **options)

    with pytest.MonkeyPatch.context() as patch:
        for norm in (
            modeling_qwen3.Qwen3RMSNorm,
            modeling_llama.LlamaRMSNorm,
            modeling_qwen3_moe.Qwen3MoeRMSNorm,
            modeling_mixtral.MixtralRMSNorm,
            modeling_mistral.MistralRMSNorm,
            modeling_gpt_oss.GptOssRMSNorm,
            modeling_deepseek_v3.DeepseekV3RMSNorm,
            modeling_glm4_moe_lite.Glm4MoeLiteRMSNorm,
        ):
            patch.setattr(norm, "forward", forward)
        patch.setattr(Tensor, "float", as_wide)
        patch.setattr(Tensor, "type", retyped_wide)
        patch.setattr(Tensor, "to", moved_wide)
        patch.setattr(nn.functional, "softmax", wide_softmax)
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
    """Per parameter, the summed norms of the samples' gradients, of each with its tokens' weights
    taken absolute: what rounding is relative to, also where they cancel."""


def reference_gradient(
    model: Any, samples: Sequence[Sample], *, balance_coef: float = 0.0
) -> Gradient:
    """CISPO's token mean, one sample at a time, through the model's stock attention.

    The load-balance loss is the library's own, over the router logits of all samples.
    """
    # The eager attention takes its softmax in fp32 whatever the type of the model.
    if "forge" in str(model.config._attn_implementation):
        model.set_attn_implementation("sdpa")
    normalizer = sum(sample.trained_tokens for sample in samples)
    total: dict[str, Tensor] = {}
    scale: dict[str, float] = {}
    loss = loss_scale = 0.0

    def gradients_of(one: Tensor) -> dict[str, Tensor]:
        model.zero_grad()
        one.backward(retain_graph=True)
        return gradients(model)

    def add(one: Tensor, uncancelled: Tensor) -> None:
        nonlocal loss, loss_scale
        loss += float(one.detach())
        loss_scale += abs(float(uncancelled.detach()))
        for name, gradient in gradients_of(uncancelled).items():
            scale[name] = scale.get(name, 0.0) + float(gradient.norm())
        for name, gradient in gradients_of(one).items():
            total[name] = total.get(name, torch.zeros_like(gradient)) + gradient

    for sample in samples:
        one, uncancelled = _sample_loss(model, sample)
        add(one / normalizer, uncancelled / normalizer)
    found = Gradient(loss=loss, of=total, loss_scale=loss_scale, scale=scale)
    return with_balance(found, model, samples, balance_coef) if balance_coef else found


def with_balance(
    policy: Gradient, model: Any, samples: Sequence[Sample], balance_coef: float
) -> Gradient:
    """The policy's loss and gradient, plus those of the experts' load-balance loss."""
    model.zero_grad()
    balance = balance_coef * _balance_loss(model, samples)
    balance.backward()
    own = gradients(model)
    return Gradient(
        loss=policy.loss + float(balance.detach()),
        of={name: one + own.get(name, 0.0) for name, one in policy.of.items()},
        loss_scale=policy.loss_scale + abs(float(balance.detach())),
        scale={
            name: size + (float(own[name].norm()) if name in own else 0.0)
            for name, size in policy.scale.items()
        },
    )


def _balance_loss(model: Any, samples: Sequence[Sample]) -> Tensor:
    apart = [
        model(
            input_ids=torch.tensor([array("i", one.ids)]),
            use_cache=False,
            output_router_logits=True,
        ).router_logits
        for one in samples
    ]
    layers = tuple(
        torch.cat([logits.flatten(0, -2) for logits in each]) for each in zip(*apart, strict=True)
    )
    top_k = model.config.num_experts_per_tok
    with pytest.MonkeyPatch.context() as patch:
        if layers[0].dtype == torch.float64:  # it would count, and divide, in fp32
            zeros = torch.zeros
            patch.setattr(torch, "zeros", lambda size, **named: zeros(size).double())
        loss = modeling_mixtral.load_balancing_loss_func(layers, layers[0].shape[-1], top_k)
    assert isinstance(loss, Tensor)
    return loss


def _sample_loss(model: Any, sample: Sample) -> tuple[Tensor, Tensor]:
    """The sum over the sample's trained tokens, written out; and with absolute weights."""
    ids_L = torch.tensor(array("i", sample.ids))
    places_T = torch.cat([torch.arange(*span) for span in sample.trained])
    behavior_T, advantages_T = (
        torch.tensor(array("f", column)) for column in (sample.behavior_logprobs, sample.advantages)
    )
    logits_LV = model(input_ids=ids_L[None], use_cache=False).logits[0]
    all_LV = (logits_LV / sample.temperature).log_softmax(-1)
    logprobs_T: Tensor = all_LV[places_T - 1, ids_L[places_T]]
    ratio_T = (logprobs_T.detach() - behavior_T).exp()
    weights_T = torch.clamp(ratio_T, 0, CAP) * advantages_T
    return -(weights_T * logprobs_T).sum(), -(weights_T.abs() * logprobs_T).sum()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """A copy of every parameter's gradient."""
    return {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def relative_errors(actual: Gradient, expected: Gradient) -> tuple[float, float]:
    """Of the loss, and the largest of any parameter's gradient.

    A gradient that is zero but for rounding is measured against a thousandth of the largest, or 1.
    """
    assert actual.of.keys() == expected.of.keys()
    floor = 1e-3 * max(expected.scale.values()) or 1.0
    loss_error = abs(actual.loss - expected.loss) / expected.loss_scale
    return loss_error, max(
        float((actual.of[name] - expected.of[name]).norm()) / max(expected.scale[name], floor)
        for name in expected.of
    )
