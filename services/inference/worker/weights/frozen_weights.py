"""Frozen weights: those in the worker's model directory, for as long as it runs.

For older versions of the policy and for other models. A checkpoint of the trainer is such a
directory. Owns the reading of the files and the version that sampled tokens carry.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, deserialize

from forge.core.errors import ConfigError
from forge.core.named_tensor import NamedTensor
from forge.runtime.process.service import ServiceContext
from forge.runtime.telemetry import log
from services.inference.engines.base import Engine, UnfitWeights
from services.inference.worker.metrics import WEIGHT_VERSION

VERSION = 1
"""Version of frozen weights in the record of a turn. It is no age; the model's name identifies the
weights."""
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
    directory = Path(context.config.model_path)
    tensors = await asyncio.to_thread(read_weights, directory)
    try:
        await engine.load(tensors, version=VERSION)
    except UnfitWeights as error:
        # Engines take the names of a publication; those of the hub differ in some families.
        tensors = await asyncio.to_thread(_published_names, directory, tensors, error)
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


def _published_names(
    directory: Path, tensors: Mapping[str, NamedTensor], unfit: UnfitWeights
) -> dict[str, NamedTensor]:
    """Return the tensors of a directory as a trainer publishes them: with the names and shapes of
    transformers' modules, after transformers' own conversion. Raises `unfit` if that fails."""
    # The environment of an engine may have no torch of ours.
    from transformers import AutoModelForCausalLM

    from services.inference.engines.tensor_bytes import NAMES, raw_bytes
    from services.inference.engines.weight_checks import DRAFT_PREFIX

    try:
        model = AutoModelForCausalLM.from_pretrained(directory, dtype="auto")
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise unfit from error
    own = {
        name: NamedTensor(
            name=name,
            dtype=NAMES[tensor.dtype],
            shape=tuple(tensor.shape),
            data=raw_bytes(tensor.contiguous()),
        )
        for name, tensor in model.state_dict().items()
    }
    if own.keys() <= tensors.keys():
        raise unfit
    return {**own, **{name: one for name, one in tensors.items() if name.startswith(DRAFT_PREFIX)}}
