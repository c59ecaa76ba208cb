"""Tiny transformers models of kinds that few tests need."""

from __future__ import annotations

from typing import Any

from transformers import (
    Glm4MoeLiteConfig,
    Glm4MoeLiteForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    MambaConfig,
    MambaForCausalLM,
    MiniMaxConfig,
    MiniMaxForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
)


def further_model(
    family: str, shape: dict[str, Any], experts: dict[str, Any], *, heads: dict[str, Any],
    window: int,
) -> Any:  # fmt: skip
    """A state instead of attention, lightning attention beside full, attention within chunks, which
    no tree has, or a plan of tensor parallelism with styles of its own: for joined products, and
    for latent keys."""
    if family == "minimax":
        layers = ["linear_attention", "full_attention"]
        sizes = {"num_local_experts": 4, "num_experts_per_tok": 2, "block_size": 4}
        return MiniMaxForCausalLM(MiniMaxConfig(**shape, **heads, **sizes, layer_types=layers))
    if family == "mamba":
        sizes = {"hidden_size": 16, "state_size": 4, "num_hidden_layers": 2}
        return MambaForCausalLM(MambaConfig(vocab_size=shape["vocab_size"], **sizes))
    if family == "llama4":
        chunks = {"attention_chunk_size": window, "layer_types": ["chunked_attention"] * 2}
        sizes = {"intermediate_size_mlp": 24, "num_local_experts": 4, "head_dim": 4}
        return Llama4ForCausalLM(Llama4TextConfig(**shape, **chunks, **sizes))
    if family == "phi3":
        ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
        return Phi3ForCausalLM(Phi3Config(**shape, **ids))
    latent = {"q_lora_rank": 8, "kv_lora_rank": 8, "v_head_dim": 6, "num_key_value_heads": 4}
    parts = {"qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "n_routed_experts": 4}
    return Glm4MoeLiteForCausalLM(
        Glm4MoeLiteConfig(**{**shape, **experts, **latent, **parts}, pad_token_id=None)
    )
