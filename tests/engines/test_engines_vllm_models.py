"""Models with experts, sinks or recurrent layers on vLLM: weights come by the stream, and their
log-probs are those of the model. Models that vLLM would serve wrongly, or end with, are refused.

Runs in the environment of `make engine-vllm` alone: `make test-engines`.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Glm4MoeConfig,
    GptOssConfig,
    MiMoV2FlashConfig,
    MixtralConfig,
    PreTrainedModel,
    Qwen3NextConfig,
)

from forge.core.errors import ConfigError, Unavailable
from services.inference.engines.base import ModelLimits
from services.inference.engines.capabilities import Role
from services.inference.engines.provider import EngineOptions
from services.inference.engines.vllm import provider
from services.inference.engines.vllm.abilities import capabilities_of
from tests.contract import engines
from tests.contract.engines import CONTEXT_TOKENS, SAMPLED, VOCABULARY, prompt_ids, published

pytestmark = pytest.mark.skipif(not engines.ON_VLLM, reason="runs by `make test-engines`")

if engines.ON_VLLM:
    arguments: Any = import_module("services.inference.engines.vllm.arguments")
    models: Any = import_module("services.inference.engines.vllm.models")
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": engines.HEAD_SIZE,
    "num_experts_per_tok": 2,
    "max_position_embeddings": CONTEXT_TOKENS,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
    "initializer_range": 0.2,
}
DTYPES = {"qwen3_next": "bfloat16"}
"""Where it is not float32."""
CONFIGS = {
    "qwen3_moe": engines.ROUTED,
    # Sinks, windows, YaRN, biases, stacked experts.
    "gpt_oss": GptOssConfig(**_SHAPE, num_local_experts=4, sliding_window=16),
    # Experts under other names than on the hub.
    "mixtral": MixtralConfig(**_SHAPE, num_local_experts=4),
    # Norms of queries, biases of the choice of experts.
    "glm4_moe": Glm4MoeConfig(
        **_SHAPE,
        moe_intermediate_size=32,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
    ),
    # Latent attention, experts in groups, a shared one; without the fields that vLLM reads.
    "deepseek_v3": DeepseekV3Config(
        **_SHAPE | {"num_key_value_heads": 4, "head_dim": 64},
        moe_intermediate_size=32,
        n_routed_experts=8,
        n_group=2,
        topk_group=1,
        n_shared_experts=1,
        first_k_dense_replace=1,
        q_lora_rank=48,
        kv_lora_rank=512,
        qk_nope_head_dim=64,
        qk_rope_head_dim=64,
        v_head_dim=64,
    ),
    # Recurrent layers beside full attention, experts, a shared one.
    "qwen3_next": Qwen3NextConfig(
        **_SHAPE,
        num_experts=4,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        layer_types=["linear_attention", "full_attention"] * 2,
    ),
}


def random_model(family: str, *, seed: int) -> PreTrainedModel:
    """As transformers runs it in float32, without a tensor that is zero."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[family], dtype=torch.float32)
    for name, weight in model.state_dict().items():
        # Zero in a new model: one that is not loaded would not be noticed.
        if "bias" in name:
            torch.nn.init.normal_(weight, std=0.5)
    return model.eval().requires_grad_(False)


@pytest.mark.parametrize("family", CONFIGS)
async def test_each_version_has_the_log_probs_of_its_model(family: str, tmp_path: Path) -> None:
    """For the first weights and for those that replace them, short prompts and long ones, and the
    same prompt again."""
    CONFIGS[family].save_pretrained(tmp_path)
    dtype = DTYPES.get(family, "float32")
    async with engines.ENGINES["vllm"](tmp_path, dtype=dtype) as pair:
        for version in (1, 2):
            model = random_model(family, seed=version)
            await pair.load(published(model), version=version)
            errors = []
            for tokens in (3, 40, 150, 150):
                ids = prompt_ids(tokens, seed=tokens)
                answer = await pair.sample(ids, replace(SAMPLED, max_tokens=32, seed=tokens))
                logits = model(torch.tensor([ids + answer.ids])).logits[0, tokens - 1 : -1]
                expected = logits.log_softmax(-1).gather(1, torch.tensor(answer.ids)[:, None])[:, 0]
                assert set(answer.versions) == {version}
                errors += (torch.tensor(answer.logprobs) - expected).abs().tolist()
            if dtype == "float32":
                assert max(errors) < 1e-4
            else:
                assert median(errors) < 0.1


async def test_logits_of_a_narrow_model_are_wide(tmp_path: Path) -> None:
    """In bfloat16 the difference of two logits of at least 1/2 would be a multiple of 1/256."""
    model = engines.reference("qwen3")
    model.config.save_pretrained(tmp_path)
    async with engines.ENGINES["vllm"](tmp_path, dtype="bfloat16") as pair:
        await pair.load(published(model), version=1)
        answer = await pair.sample(prompt_ids(20), replace(SAMPLED, max_tokens=8, top_logprobs=4))
    logprobs = torch.tensor([[logprob for _, logprob in top] for top in answer.top])
    steps = (logprobs[:, 1:] - logprobs[:, :1]) * 256
    assert ((steps - steps.round()).abs() > 0.01).any()


async def test_linear_attention_in_float32_is_refused(tmp_path: Path) -> None:
    """At the start: vLLM's process would end at the first request."""
    CONFIGS["qwen3_next"].save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="linear attention on CPUs computes in bfloat16"):
        async with engines.ENGINES["vllm"](tmp_path):
            pass


@pytest.mark.parametrize("has_bfloat16", [True, False])
def test_auto_serves_no_bfloat16_that_a_cpu_would_emulate(
    has_bfloat16: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the embedded engine and a trainer with `autocast = "auto"`, so their log-probs agree;
    linear attention has bfloat16 alone."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": has_bfloat16})
    for family in ("qwen3_moe", "qwen3_next"):
        folder = str(tmp_path / family)
        CONFIGS[family].__class__(
            **CONFIGS[family].to_dict() | {"dtype": "bfloat16"}
        ).save_pretrained(folder)
        narrow = has_bfloat16 or family == "qwen3_next"
        found = models.served_dtype(folder, "auto", device="cpu")
        assert found == ("bfloat16" if narrow else "float32")
        assert models.served_dtype(folder, "auto", device="cuda:0") == "bfloat16"
        assert models.served_dtype(folder, "float32", device="cpu") == "float32"


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"linear_key_head_dim": 32, "linear_value_head_dim": 32}, "linear_key_head_dim = 32"),
        ({"linear_value_head_dim": 64}, "linear_value_head_dim = 64"),
        ({"linear_num_value_heads": 3}, "linear_num_value_heads = 3"),
    ],
)
def test_linear_attention_of_other_sizes_is_refused(
    changed: dict[str, int], named: str, tmp_path: Path
) -> None:
    """By `--check` and at the start, with the fields and the words of vLLM's kernel: its process
    would end at the first request. On a GPU other kernels compute them."""
    config = CONFIGS["qwen3_next"].to_diff_dict() | changed
    Qwen3NextConfig(**config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=f"{named}.*refuses them .*serve this model on a GPU"):
        provider.check(str(tmp_path), context_tokens=0, dtype="bfloat16")
    provider.check(str(tmp_path), context_tokens=0, dtype="bfloat16", device="cuda:0")


def test_latent_attention_of_other_sizes_is_refused(tmp_path: Path) -> None:
    """By `--check` and at the start, where vLLM's kernel on a CPU has one size. On a GPU others
    compute them."""
    config = CONFIGS["deepseek_v3"].to_diff_dict() | {"kv_lora_rank": 64}
    DeepseekV3Config(**config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"latent heads of 128; .* has 576"):
        provider.check(str(tmp_path), context_tokens=0)
    provider.check(str(tmp_path), context_tokens=0, device="cuda:0")


def mimo(**own: Any) -> MiMoV2FlashConfig:
    """A small MiMo V2: sinks, and experts in stacks."""
    return MiMoV2FlashConfig(
        **_SHAPE | {"num_hidden_layers": 2, "v_head_dim": engines.HEAD_SIZE},
        moe_intermediate_size=32,
        n_routed_experts=4,
        layer_types=["full_attention", "sliding_attention"],
        mlp_layer_types=["dense", "sparse"],
        sliding_window=16,
        **own,
    )


VLLM_FIELDS: dict[str, Any] = {
    "hybrid_layer_pattern": [0, 1],
    "moe_layer_freq": [0, 1],
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": engines.HEAD_SIZE,
    "sliding_window_size": 16,
    "layernorm_epsilon": 1e-5,
    "add_swa_attention_sink_bias": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}
"""Of a MiMo V2 as its authors publish it."""


async def test_weights_that_no_update_would_reach_are_refused(tmp_path: Path) -> None:
    """At the start, by a reload without data. The probe might not find them: sinks of a new model
    are near those that vLLM makes up."""
    mimo(**VLLM_FIELDS).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"never update \S+attention_sink_bias: "):
        async with engines.ENGINES["vllm"](tmp_path):
            pass


async def test_start_that_fails_names_the_error_of_vllms_process(tmp_path: Path) -> None:
    """Here it misses a field of the model's config. The worker ends with exit code 1."""
    mimo().save_pretrained(tmp_path)
    with pytest.raises(Unavailable, match=r"did not start: AttributeError: .*hybrid_layer_pattern"):
        async with engines.ENGINES["vllm"](tmp_path):
            pass


async def test_end_of_vllms_process_names_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here at the first request, since the check of the model is off."""
    monkeypatch.setattr(models, "_check_delta_net", lambda *_, **__: None)
    config = CONFIGS["qwen3_next"].to_diff_dict()
    config |= {"linear_key_head_dim": 32, "linear_value_head_dim": 32}
    Qwen3NextConfig(**config).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_config(Qwen3NextConfig(**config), dtype=torch.float32)
    async with engines.ENGINES["vllm"](tmp_path, dtype="bfloat16") as pair:
        with pytest.raises(Unavailable, match="ended: RuntimeError: Unexpected head dim size, 32"):
            await pair.load(published(model), version=1)


def test_vllms_own_record_of_experts_is_refused(tmp_path: Path) -> None:
    """vLLM's option would end the start with words of vLLM; it is refused with those of ours. The
    engine's own record is of a CPU, of one device, and of layers that Python calls."""
    engines.CONFIGS["llama"].save_pretrained(tmp_path)
    limits = ModelLimits(context_tokens=CONTEXT_TOKENS, vocabulary=VOCABULARY)
    options = EngineOptions(
        model_path=str(tmp_path),
        request_timeout_s=1.0,
        device="cuda:0",
        extra={"enable_return_routed_experts": True},
    )
    with pytest.raises(ConfigError, match="vLLM records experts in its second model runner"):
        arguments.engine_arguments(options, limits, role="both", events=None)
    assert not capabilities_of(options, "both").routed_experts
    cases: tuple[tuple[dict[str, Any], Role, bool], ...] = (
        ({}, "both", True),
        ({}, "decode", False),
        ({"enforce_eager": False}, "both", False),
        ({"tensor_parallel_size": 2}, "both", False),
        ({"speculative_config": {"method": "ngram"}}, "both", False),
    )
    for extra, role, recorded in cases:
        options = EngineOptions(model_path=str(tmp_path), request_timeout_s=1.0, extra=extra)
        assert capabilities_of(options, role).routed_experts == recorded


async def test_drafts_by_weights_are_refused(tmp_path: Path) -> None:
    """A publication has no weights for vLLM's own drafters: they would draft by random ones."""
    engines.CONFIGS["llama"].save_pretrained(tmp_path)
    limits = ModelLimits(context_tokens=CONTEXT_TOKENS, vocabulary=VOCABULARY)
    for chosen in ({"method": "medusa"}, {"model": "draft"}, {"method": "mtp"}):
        options = EngineOptions(
            model_path=str(tmp_path), request_timeout_s=1.0, extra={"speculative_config": chosen}
        )
        with pytest.raises(ConfigError, match="its weights come with no publication"):
            arguments.engine_arguments(options, limits, role="both", events=None)
