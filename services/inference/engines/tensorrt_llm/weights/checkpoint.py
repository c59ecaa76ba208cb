"""The tensors of the checkpoint that the library has loaded: each version must have the same ones.

The library casts any type to its own, ignores names that it does not know, and keeps what it does
not get, so nothing else finds weights of another model. Reads the headers of files alone.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from xxhash import xxh3_64_intdigest

from forge.core.errors import ConfigError
from forge.core.named_tensor import SAFETENSORS_DTYPES, NamedTensor
from services.inference.engines.base import BrokenWeights, UnfitWeights

_ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "uint8": 1,
    "int8": 1,
    "bool": 1,
}
_FLOATS = frozenset({"float64", "float32", "bfloat16", "float16"})
"""A cast between these keeps the values; one to fewer bits needs scales."""
_NO_MODEL = frozenset({"master.safetensors", "consolidated.safetensors"})
"""The optimizer's copy in a checkpoint of the trainer, and a second copy of the model."""
_DRAFT_PREFIX = "mtp."
_HEAD = "lm_head.weight"
_EMBEDDING = "embed_tokens.weight"
_LAYER = re.compile(r"\.layers\.(\d+)\.")
_STACK = re.compile(r"(.+\.experts)\.(gate_up_proj|down_proj)")
_NAMED = 3
"""Names in an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """Types and shapes by name."""

    types: Mapping[str, str]
    shapes: Mapping[str, tuple[int, ...]]
    optional: frozenset[str] = frozenset()
    """Names that a version may lack: layers that draft, a tied head, constants."""
    quantization: str = ""
    """How its weights are quantized; empty: not at all."""

    def fit(self, tensors: Mapping[str, NamedTensor], *, version: int) -> dict[str, NamedTensor]:
        """Return a version's tensors under the names of the checkpoint, without draft heads that
        the library does not have. Reads them all, so call it on a thread.

        Raises `UnfitWeights` for other names, types or shapes, and for a tensor with too few or
        many bytes; `BrokenWeights` for NaN or infinity.
        """
        found = {one.name: one for tensor in tensors.values() for one in self._renamed(tensor)}
        for name in [name for name in found if self._is_tied_head(name, found)]:
            del found[name]
        self._check_names(found, version=version)
        for tensor in found.values():
            self._check_tensor(tensor, version=version)
        for tensor in found.values():
            if tensor.dtype in _FLOATS and not _is_finite(tensor):
                raise BrokenWeights(f"weights {version}: {tensor.name} has NaN or infinity")
        return found

    def _renamed(self, tensor: NamedTensor) -> Iterator[NamedTensor]:
        """Yield a tensor, or the experts of a stack; nothing for what the library does not have."""
        name = tensor.name
        stack = _STACK.fullmatch(name)
        if name in self.shapes:
            yield tensor
        elif name.startswith(_DRAFT_PREFIX):
            return
        elif stack and f"{stack[1]}.0.down_proj.weight" in self.shapes and _is_stack(tensor):
            yield from _experts(tensor, stack[1], stack[2])
        else:
            yield tensor

    def _is_tied_head(self, name: str, found: Mapping[str, NamedTensor]) -> bool:
        """Whether it is a second name of the embedding, which the checkpoint does not have."""
        if not name.endswith(_HEAD) or name in self.shapes:
            return False
        embeddings = (one for key, one in found.items() if key.endswith(_EMBEDDING))
        digest = xxh3_64_intdigest(found[name].data)
        return any(xxh3_64_intdigest(one.data) == digest for one in embeddings)

    def _check_names(self, found: Mapping[str, NamedTensor], *, version: int) -> None:
        missing = sorted(self.shapes.keys() - self.optional - found.keys())
        unknown = sorted(found.keys() - self.shapes.keys())
        if missing or unknown:
            raise UnfitWeights(
                f"weights {version} are not those of the checkpoint in model_path: "
                f"{len(missing)} tensors are missing ({', '.join(missing[:_NAMED])}), "
                f"{len(unknown)} are unknown ({', '.join(unknown[:_NAMED])}){self._advice()}"
            )

    def _check_tensor(self, tensor: NamedTensor, *, version: int) -> None:
        name, wanted = tensor.name, self.types[tensor.name]
        if tensor.dtype != wanted and not {tensor.dtype, wanted} <= _FLOATS:
            raise UnfitWeights(
                f"weights {version}: {name} is {tensor.dtype}, the checkpoint in model_path has "
                f"{wanted}{self._advice()}"
            )
        if tensor.shape != self.shapes[name]:
            raise UnfitWeights(
                f"weights {version}: {name} is {list(tensor.shape)}, the checkpoint in model_path "
                f"has {list(self.shapes[name])}{self._advice()}"
            )
        size = math.prod(tensor.shape) * _ITEM_BYTES.get(tensor.dtype, 0)
        if memoryview(tensor.data).nbytes != size:
            raise UnfitWeights(
                f"weights {version}: {name} has {memoryview(tensor.data).nbytes} bytes, "
                f"{tensor.dtype} of shape {list(tensor.shape)} has {size}"
            )

    def _advice(self) -> str:
        if not self.quantization:
            return ""
        return (
            f". The checkpoint is quantized ({self.quantization}), and nothing quantizes the "
            "trainer's tensors: serve the checkpoint in 16 bits"
        )


def read_checkpoint(model_path: str) -> Checkpoint:
    """Read the headers of a model directory. Raises `ConfigError` for one without weights."""
    directory = Path(model_path)
    files = [file for file in sorted(directory.glob("*.safetensors")) if file.name not in _NO_MODEL]
    if not files:
        raise ConfigError(
            f"model_path = {model_path!r}: there is no *.safetensors in it; engine 'tensorrt_llm' "
            "loads them at its start, and compares each new version with them"
        )
    types: dict[str, str] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        try:
            with safe_open(file, framework="numpy") as opened:
                for name in opened.keys():  # noqa: SIM118  # It is no mapping.
                    part = opened.get_slice(name)
                    types[name] = SAFETENSORS_DTYPES.get(part.get_dtype(), part.get_dtype())
                    shapes[name] = tuple(part.get_shape())
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"model_path = {model_path!r}: {file.name}: {error}") from None
    config = _read_json(directory / "config.json")
    return Checkpoint(
        types=types,
        shapes=shapes,
        optional=frozenset(name for name in types if _is_optional(name, config)),
        quantization=_quantization(directory, config),
    )


def _is_optional(name: str, config: Mapping[str, Any]) -> bool:
    text = {**config, **config.get("text_config", {})}
    if name.endswith(_HEAD):
        return bool(text.get("tie_word_embeddings"))
    if name.startswith(_DRAFT_PREFIX) or name.endswith("rotary_emb.inv_freq"):
        return True
    layer, layers = _LAYER.search(name), text.get("num_hidden_layers")
    return layer is not None and isinstance(layers, int) and int(layer[1]) >= layers


def _quantization(directory: Path, config: Mapping[str, Any]) -> str:
    found = config.get("quantization_config")
    if not isinstance(found, Mapping):
        found = _read_json(directory / "hf_quant_config.json").get("quantization")
    if not isinstance(found, Mapping):
        return ""
    return str(found.get("quant_algo") or found.get("quant_method") or "by its configuration")


def _read_json(file: Path) -> dict[str, Any]:
    """Return a JSON object; empty without the file."""
    try:
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: {error}") from None
    return found


def _is_stack(tensor: NamedTensor) -> bool:
    """Whether it has the experts of a layer, [experts, outputs, inputs], in whole bytes."""
    size = math.prod(tensor.shape) * _ITEM_BYTES.get(tensor.dtype, 0)
    return len(tensor.shape) == 3 and memoryview(tensor.data).nbytes == size > 0


def _experts(tensor: NamedTensor, owner: str, projection: str) -> Iterator[NamedTensor]:
    """Yield the matrices of a stack, as views; gate and up follow each other in one of both."""
    parts = ("gate_proj", "up_proj") if projection == "gate_up_proj" else (projection,)
    experts, outputs, inputs = tensor.shape
    rows = outputs // len(parts)
    size = rows * inputs * _ITEM_BYTES[tensor.dtype]
    data = memoryview(tensor.data)
    for number in range(experts * len(parts)):
        expert, part = divmod(number, len(parts))
        yield replace(
            tensor,
            name=f"{owner}.{expert}.{parts[part]}.weight",
            shape=(rows, inputs),
            data=data[number * size : (number + 1) * size],
        )


def _is_finite(tensor: NamedTensor) -> bool:
    # The library's environment has torch, the host that reads findings of it may have none.
    from services.inference.engines.tensor_bytes import from_named, is_finite

    return is_finite(from_named(tensor))
