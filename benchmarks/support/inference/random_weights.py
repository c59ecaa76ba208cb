"""A model directory for engines, and random weights for it."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM

from forge.core.named_tensor import NamedTensor
from services.inference.engines.tensor_bytes import to_named


def random_weights(config: Any, folder: str) -> dict[str, NamedTensor]:
    """Save the configuration in the folder; return float32 weights of seed 0."""
    config.save_pretrained(folder)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return {name: to_named(name, one) for name, one in model.state_dict().items()}
