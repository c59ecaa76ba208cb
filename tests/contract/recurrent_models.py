"""Small models with layers whose state goes from token to token."""

from __future__ import annotations

import torch
from transformers import (
    AutoModelForCausalLM,
    FalconH1Config,
    Mamba2Config,
    MiniMaxConfig,
    PreTrainedModel,
    Qwen3NextConfig,
)

from tests.contract.engines import SHAPE, VOCABULARY

RECURRENT = {
    # Attention between two layers with convolutions and states.
    "qwen3_next": Qwen3NextConfig(
        # Its own passes of other lengths differ by more with larger weights.
        **SHAPE | {"initializer_range": 0.1},
        head_dim=16,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
    ),
    # Both in each layer.
    "falcon_h1": FalconH1Config(
        **SHAPE,
        head_dim=16,
        mamba_d_ssm=64,
        mamba_n_heads=4,
        mamba_d_head=16,
        mamba_n_groups=1,
        mamba_d_state=16,
        mamba_chunk_size=16,
    ),
    # Lightning attention, and experts.
    "minimax": MiniMaxConfig(
        **SHAPE | {"initializer_range": 0.1},
        head_dim=16,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        num_local_experts=4,
        num_experts_per_tok=2,
        block_size=16,
    ),
    # No attention.
    "mamba2": Mamba2Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_hidden_layers=3,
        state_size=16,
        num_heads=8,
        head_dim=16,
        n_groups=2,
        chunk_size=16,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
        initializer_range=0.2,
    ),
}


def reference(family: str, *, seed: int = 0) -> PreTrainedModel:
    """The model as transformers runs it, with random weights."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(RECURRENT[family], dtype=torch.float32)
    return model.eval().requires_grad_(False)
