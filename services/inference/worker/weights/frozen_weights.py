"""Frozen weights: those in the worker's model directory, for as long as it runs.

For older versions of the policy and for other models. A checkpoint of the trainer is such a
directory. Owns the reading of the files and the version that sampled tokens carry.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, deserialize

from forge.core.errors import ConfigError
from forge.core.named_tensor import NamedTensor
from forge.runtime.process.service import ServiceContext
from forge.runtime.telemetry import log
from services.inference.engines.base import Engine
from services.inference.worker.metrics import WEIGHT_VERSION

VERSION = 1
"""Version of frozen weights: the number in a turn's record tells nothing of their age, the name of
their model does."""
_NO_MODEL = ("master.safetensors",)
"""Files of a checkpoint beside its model and its draft heads."""
_DTYPES = {
    "F32": "float32",
    "BF16": "bfloat16",
    "F16": "float16",
    "I32": "int32",
    "I64": "int64",
    "U8": "uint8",
}


async def load_frozen(context: ServiceContext, engine: Engine) -> None:
    """Load the weights of `model_path` and let the worker register. Raises ConfigError for a
    directory without weights, UnfitWeights for weights of another model."""
    began_s = time.monotonic()
    tensors = await asyncio.to_thread(read_weights, Path(context.config.model_path))
    await engine.load(tensors, version=VERSION)
    WEIGHT_VERSION.set(VERSION)
    context.metadata["weight_version"] = str(VERSION)
    context.metadata["weights"] = "frozen"
    log.info(
        "frozen_weights_loaded",
        model_path=context.config.model_path,
        tensors=len(tensors),
        load_s=round(time.monotonic() - began_s, 3),
    )


def read_weights(directory: Path) -> dict[str, NamedTensor]:
    """Return the tensors of a model directory by name. Raises ConfigError."""
    files = [file for file in sorted(directory.glob("*.safetensors")) if file.name not in _NO_MODEL]
    if not files:
        raise ConfigError(f"model_path = {str(directory)!r}: there is no *.safetensors in it")
    tensors: dict[str, NamedTensor] = {}
    for file in files:
        try:
            stored_tensors: list[tuple[str, Any]] = deserialize(file.read_bytes())  # type: ignore[no-untyped-call]
            for name, stored in stored_tensors:
                tensors[name] = NamedTensor(
                    name=name,
                    dtype=_DTYPES[stored["dtype"]],
                    shape=tuple(stored["shape"]),
                    data=memoryview(stored["data"]),
                )
        except (OSError, SafetensorError, KeyError) as error:
            raise ConfigError(
                f"model_path = {str(directory)!r}: {file.name}: {type(error).__name__}: {error}"
            ) from None
    return tensors
