"""Which models vLLM computes, in which type, and by which of its kernels on a CPU."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from forge.core.errors import ConfigError, first_line
from forge.rl.model.precision import computes_bfloat16

_DELTA_NET = "linear_key_head_dim"
"""In the config of a model with gated delta nets, for example Qwen 3 Next."""
_LATENT = "kv_lora_rank"
"""In the config of a model with latent attention, for example DeepSeek V3."""


def architecture_of(model_path: str) -> str:
    """Return the name of the model's class. Raises ConfigError for a config without one."""
    try:
        config = AutoConfig.from_pretrained(model_path)
    except (ValueError, KeyError, OSError) as error:
        raise ConfigError(f"model_path = {model_path!r}: {error}") from error
    named = getattr(config, "architectures", None)
    found = named[0] if named else MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    if not isinstance(found, str):
        raise ConfigError(f"model_path = {model_path!r}: no causal model of {config.model_type!r}")
    return found


def check_model(model_path: str, *, device: str, dtype: str = "auto") -> None:
    """Raises ConfigError for a model that vLLM does not have, or not on this device."""
    from vllm import ModelRegistry

    name = architecture_of(model_path)
    if name not in ModelRegistry.get_supported_archs():
        raise ConfigError(
            f"model_path = {model_path!r}: vLLM has no {name}; engine = 'embedded' runs any model "
            "of transformers that it computes exactly"
        )
    if device != "cpu":
        return
    config = AutoConfig.from_pretrained(model_path).get_text_config()
    _check_heads(model_path, config)
    if has_delta_nets(config):
        _check_delta_net(model_path, config, dtype=served_dtype(model_path, dtype, device=device))


def has_delta_nets(config: Any) -> bool:
    """Whether a model has gated delta nets."""
    return hasattr(config, _DELTA_NET)


def has_latent_attention(config: Any) -> bool:
    """Whether a model has latent attention (MLA)."""
    return bool(getattr(config, _LATENT, None))


def _check_heads(model_path: str, config: Any) -> None:
    """Raises ConfigError for heads that vLLM's attention on CPUs lacks: vLLM accepts such a model
    and ends at its first request."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend

    if has_latent_attention(config):
        size = config.kv_lora_rank + config.qk_rope_head_dim
        kind, sizes = "latent heads", CPUMLABackend.get_supported_head_sizes()
    else:
        heads = getattr(config, "num_attention_heads", 0)
        size = getattr(config, "head_dim", None) or (config.hidden_size // heads if heads else 0)
        kind, sizes = "heads", CPUAttentionBackend.get_supported_head_sizes()
    if size and size not in sizes:
        raise ConfigError(
            f"model_path = {model_path!r}: {kind} of {size}; vLLM's attention on CPUs has "
            f"{', '.join(map(str, sizes))}"
        )


def served_dtype(model_path: str, chosen: str, *, device: str) -> str:
    """Return the type to serve in. vLLM's own auto would serve float32 models in 16 bits, and
    bfloat16 on a CPU that has to emulate it."""
    if chosen != "auto":
        return chosen
    config = AutoConfig.from_pretrained(model_path).get_text_config()
    stored = str(getattr(config, "dtype", None) or "float32").removeprefix("torch.")
    # Gated delta nets have no other type on a CPU.
    emulated = device == "cpu" and not computes_bfloat16(torch.device(device))
    if stored == "bfloat16" and emulated and not has_delta_nets(config):
        return "float32"
    return stored


def _check_delta_net(model_path: str, config: Any, *, dtype: str) -> None:
    """Compute one token as vLLM's linear attention does, which accepts such a model and ends at its
    first request. Raises ConfigError."""
    from vllm._custom_ops import chunk_gated_delta_rule_cpu

    if dtype != "bfloat16":
        raise ConfigError(
            f"dtype = {dtype!r}: vLLM's linear attention on CPUs computes in bfloat16 alone"
        )
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    key_size, value_size = config.linear_key_head_dim, config.linear_value_head_dim
    try:
        chunk_gated_delta_rule_cpu(
            query=torch.zeros(1, 1, keys, key_size, dtype=torch.bfloat16),
            key=torch.zeros(1, 1, keys, key_size, dtype=torch.bfloat16),
            value=torch.zeros(1, 1, values, value_size, dtype=torch.bfloat16),
            g=torch.zeros(1, 1, values),
            beta=torch.zeros(1, 1, values, dtype=torch.bfloat16),
            initial_state=torch.zeros(1, values, key_size, value_size),
            output_final_state=True,
            cu_seqlens=torch.tensor([0, 1], dtype=torch.int32),
            head_first=False,
            use_qk_l2norm_in_kernel=True,
            initial_state_indices=torch.zeros(1, dtype=torch.int32),
        )
    except RuntimeError as error:
        raise ConfigError(
            f"model_path = {model_path!r}: linear_num_key_heads = {keys}, linear_num_value_heads = "
            f"{values}, linear_key_head_dim = {key_size}, linear_value_head_dim = {value_size}: "
            f"vLLM's linear attention on CPUs refuses them ({first_line(error)}); serve "
            "this model on a GPU"
        ) from error
