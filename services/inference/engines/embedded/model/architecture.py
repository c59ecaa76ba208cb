"""The architecture of a model of transformers: its config, and its module without weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights

from forge.core.errors import InvalidArgument
from forge.rl import numerics
from forge.rl.model.precision import computes_bfloat16
from services.inference.engines.embedded.kv import attention


def read_config(model_path: str) -> Any:
    """Return the configuration of transformers in `model_path`/config.json. Raises
    InvalidArgument."""
    if not (Path(model_path) / "config.json").is_file():
        raise InvalidArgument(f"model_path = {model_path!r}: there is no config.json in it")
    try:
        return AutoConfig.from_pretrained(model_path)
    except (ValueError, KeyError, OSError, AttributeError) as error:
        raise InvalidArgument(f"model_path = {model_path!r}: {error}") from error


def built(config: Any, kind: torch.dtype) -> Any:
    """Return a model with undefined weights of this type. Its buffers keep float32 or more, which a
    model built in 16 bits would round."""
    narrow = numerics.is_narrow(kind)
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(
            config,
            dtype=torch.float32 if narrow else kind,
            attn_implementation=attention.IMPLEMENTATION,
        )
    model.tie_weights()
    for one in model.parameters():
        if narrow and one.is_floating_point():
            one.data = torch.empty_like(one, dtype=kind)
    return model


def matrix_type(model: torch.nn.Module) -> torch.dtype:
    """Type of the model's matrices."""
    kinds = (one.dtype for one in model.parameters() if one.is_floating_point())
    return next(kinds)


def fast_type(configured: torch.dtype | None, device: str) -> torch.dtype:
    """The config's type, float32 where the device has no fast bfloat16."""
    if configured == torch.bfloat16 and not computes_bfloat16(torch.device(device)):
        return torch.float32
    return configured or torch.float32
