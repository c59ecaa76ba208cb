"""The type of a worker's model: the meaning of the setting `dtype`.

torch is imported at the first use: the environments of other engines have versions of their own.
"""

from __future__ import annotations

from forge.runtime.settings.model_config import stored_type


def engine_dtype(setting: str, *, device: str) -> str:
    """Return what the engine gets: "auto" is its own to read from the model, "device" is not.

    "device" follows the rule of the trainer's `autocast = "auto"`.
    """
    if setting != "device":
        return setting
    import torch

    from forge.rl.model.precision import computes_bfloat16

    return "bfloat16" if computes_bfloat16(torch.device(device)) else "float32"


def computed_type(setting: str, *, device: str, model_path: str) -> str:
    """Return the name of the type in which the worker computes."""
    if setting != "auto":
        return engine_dtype(setting, device=device)
    stored = stored_type(model_path) or "float32"
    return engine_dtype("device", device=device) if stored == "bfloat16" else stored
