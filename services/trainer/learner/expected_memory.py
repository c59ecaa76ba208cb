"""The memory that a step is expected to take on each GPU, logged before the first one.

Owns the settings of `services.trainer.memory_plan` in a configuration of the trainer.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from transformers import AutoConfig

from forge.rl.device import device_of
from forge.runtime.telemetry import log
from services.trainer.config import TrainerConfig
from services.trainer.memory_plan import GIB, Estimate, MemorySettings, estimate, size_of
from services.trainer.model.placement import backbone_dtype


def log_expected_memory(config: TrainerConfig) -> None:
    """Log the estimate for a GPU, as a warning if it exceeds the GPU's memory; other devices are
    left out. Call it before ranks meet: it uses process groups of its own."""
    device = device_of(config.device, rank=0)
    if device.type == "cuda":
        log_estimate(config, device_bytes=torch.cuda.get_device_properties(device).total_memory)


def log_estimate(config: TrainerConfig, *, device_bytes: float) -> None:
    """Log the estimate beside the memory of a device. A model that cannot be estimated is logged
    too, and fails no start."""
    try:
        found = expected_memory(config)
    except Exception as error:
        log.warning("memory_not_estimated", error=repr(error))
        return
    fits = found.total <= device_bytes
    parts = {name: getattr(found, name) for name in Estimate.__dataclass_fields__}
    (log.info if fits else log.warning)(
        "memory_estimated",
        total_gib=round(found.total / GIB, 2),
        device_gib=round(device_bytes / GIB, 2),
        **{f"{name}_gib": round(value / GIB, 2) for name, value in parts.items()},
        **({} if fits else {"advice": "forge trainer plan names settings that fit"}),
    )


def expected_memory(config: TrainerConfig) -> Estimate:
    """The estimate for one rank. Raises like `size_of`."""
    shape, lora = config.mesh_shape, config.lora if config.lora.rank else None
    narrow = backbone_dtype(config.autocast, device_of(config.device, rank=0)) is not None
    bfloat16 = narrow and config.publish_dtype in ("auto", "bfloat16")
    size = partial(size_of, bfloat16=bfloat16, tp=shape.tp)
    return estimate(
        size(_configuration(config.model_path), lora=lora),
        MemorySettings(
            shape=shape,
            context=config.token_budget,
            bfloat16=bfloat16,
            recompute=config.recompute_share if config.recompute_activations else 0.0,
            optimizer=config.optimizer.name,
            frozen=tuple(size(_configuration(path), frozen=True) for path in _frozen(config)),
        ),
    )


def _frozen(config: TrainerConfig) -> list[str]:
    """Directories of the models beside the policy; with adapters its base is the reference."""
    reference = config.reference_path or config.model_path
    own = config.lora.rank and reference == config.model_path
    beside = [reference] if config.objective.kl_coef and not own else []
    return [*beside, *([config.teacher_path] if config.teacher_path else [])]


def _configuration(path: str) -> object:
    return AutoConfig.from_pretrained(Path(path))
