"""Limits of the served model, from its config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from forge.core.errors import ConfigError
from services.inference.engines.base import ModelLimits


def read_limits(model_path: str, *, context_tokens: int) -> ModelLimits:
    """Read the limits; `context_tokens` 0 takes the model's own. Raises ConfigError."""
    file = Path(model_path) / "config.json"
    try:
        config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model_path = {model_path!r}: config.json cannot be read: {error}"
        ) from None
    # Multimodal models have the language model's part in text_config.
    config = {**config, **config.get("text_config", {})}
    vocabulary = config.get("vocab_size")
    if not isinstance(vocabulary, int):
        raise ConfigError(f"model_path = {model_path!r}: config.json has no vocab_size")
    longest = config.get("max_position_embeddings") or context_tokens
    if not longest:
        raise ConfigError(
            f"model_path = {model_path!r}: config.json has no max_position_embeddings; "
            "set context_tokens"
        )
    return ModelLimits(
        context_tokens=min(context_tokens or longest, longest), vocabulary=vocabulary
    )
