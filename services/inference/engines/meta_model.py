"""The model of transformers without data: names, shapes and ties of its tensors."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM


def meta_model(model_path: str) -> Any:
    """Build the model of a directory from its configuration, on the meta device."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_path))
