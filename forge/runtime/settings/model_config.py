"""Facts of the config.json of a model directory, without the libraries that build the model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def stored_type(model_path: str) -> str:
    """Return the type that config.json names, e.g. "bfloat16"; "" for none or no such file."""
    try:
        config: Mapping[str, Any] = json.loads((Path(model_path) / "config.json").read_bytes())
    except (OSError, ValueError):
        return ""
    # Multimodal models have the language model's part in text_config.
    parts = (config.get("text_config") or {}, config)
    names = (part.get(key) for part in parts for key in ("dtype", "torch_dtype"))
    return str(next(filter(None, names), "")).removeprefix("torch.")
