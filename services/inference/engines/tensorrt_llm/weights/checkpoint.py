"""The tensors of the checkpoint that the library has loaded: each version must have the same ones.

The library casts any type to its own, ignores names that it does not know, and keeps what it does
not get, so nothing else finds weights of another model. Reads the headers of files, and the scales
that calibration has found.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from safetensors import SafetensorError, safe_open
from xxhash import xxh3_64_intdigest

from forge.core.errors import ConfigError, InvalidArgument
from forge.core.named_tensor import SAFETENSORS_DTYPES, NamedTensor
from services.inference.engines.arriving import Form
from services.inference.engines.base import BrokenWeights, UnfitWeights
from services.inference.engines.probes import ROUNDED_TOLERANCE
from services.inference.engines.tensorrt_llm.library.surface import Feature
from services.inference.engines.tensorrt_llm.weights.matrix_forms import TypeAndShape
from services.inference.engines.tensorrt_llm.weights.quantization import (
    CALIBRATED,
    FLOATS,
    Quantization,
    UnknownForm,
    read_quantization,
)

if TYPE_CHECKING:
    from services.inference.engines.tensorrt_llm.weights.own_names import OwnNames

Named = TypeVar("Named", NamedTensor, Form)

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
_ROUNDED = frozenset({"bfloat16", "float16"})
_NO_MODEL = frozenset({"master.safetensors", "consolidated.safetensors"})
"""The optimizer's copy in a checkpoint of the trainer, and a second copy of the model."""
_DRAFT_PREFIX = "mtp."
_HEAD = "lm_head.weight"
_EMBEDDING = "embed_tokens.weight"
_LAYER = re.compile(r"\.layers\.(\d+)\.")
_NAMED = 3
"""Names in an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitting:
    """A version that fits the checkpoint."""

    tensors: Mapping[str, NamedTensor]
    names: OwnNames | None = None
    """The way to the names of the checkpoint; None: `tensors` have them."""
    scales: Quantization | None = None
    """The way to the types of the checkpoint; None: the library casts."""

    @property
    def rounded(self) -> bool:
        """Whether a tensor was published in 16 bits."""
        return is_rounded(one.dtype for one in self.tensors.values())

    @property
    def sizes(self) -> list[int]:
        """Bytes of each tensor; those of a quantized one are fewer."""
        return [memoryview(one.data).nbytes for one in self.tensors.values()]

    def loaded(self) -> Iterator[NamedTensor]:
        """Yield the tensors as the checkpoint has them. With `names` experts are copied, one layer
        at a time, and quantized tensors, one at a time."""
        found = iter(self.tensors.values())
        if self.names is not None:
            found = self.names.converted(self.tensors)
        return found if self.scales is None else self.scales.converted(found, self.tensors.keys())

    def fitting(self) -> Fitting:
        """Return itself."""
        return self

    def give_up(self) -> None:
        """Do nothing: all tensors are here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FittingForms:
    """A version that fits the checkpoint, and whose data has not arrived."""

    loaded: Mapping[str, Form]
    """By the names of the checkpoint, in the order of their arrival."""
    in_hub_names: bool
    """Whether these are names of the hub, which the version has in other tensors."""
    scales: Quantization | None = None
    """See `Fitting`."""

    def parts(self, tensor: NamedTensor) -> list[NamedTensor]:
        """Return what is loaded of a tensor of the version; empty for a draft head that the
        checkpoint lacks."""
        parts = tensor.in_hub_names() if self.in_hub_names else (tensor,)
        return [one for one in parts if one.name in self.loaded]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """Types and shapes by name."""

    model_path: str
    types: Mapping[str, str]
    shapes: Mapping[str, tuple[int, ...]]
    optional: frozenset[str] = frozenset()
    """Names that a version may lack: layers that draft, a tied head, constants."""
    quantization: str = ""
    """How its weights are quantized, and what `scales` lacks; empty: not at all."""
    scales: Quantization | None = None
    """The quantization, if versions can be given it."""

    @property
    def rounded(self) -> bool:
        """Whether the library computes with tensors in 16 bits or fewer."""
        return bool(self.quantization) or is_rounded(self.types.values())

    @property
    def probe_tolerance(self) -> float:
        """Largest mean error of a probe, in nats, of a version in this form."""
        return ROUNDED_TOLERANCE if self.scales is None else self.scales.form.probe_tolerance

    def fit(self, tensors: Mapping[str, NamedTensor], *, version: int) -> Fitting:
        """Return a version without draft heads that the library does not have, by the names of the
        checkpoint, or with the way to them. Reads all tensors, so call it on a thread.

        Raises `UnfitWeights` for other names, types or shapes, and for a tensor with too few or
        many bytes; `BrokenWeights` for NaN or infinity.
        """
        found = self._without_drafts(tensors)
        for name in [name for name in found if self._is_tied_head(name, found)]:
            del found[name]
        fitting = self._fitting(found, version=version)
        for tensor in fitting.tensors.values():
            _check_finite(tensor, version=version)
        return fitting

    def fit_forms(self, forms: Mapping[str, Form], *, version: int) -> FittingForms | None:
        """Return what to load of a version whose data has not arrived. None for names that the
        checkpoint and the manifest's names of the hub lack: `fit` then reads or converts the data.

        Raises `UnfitWeights` for other names, types or shapes.
        """
        forms = self._without_drafts(forms)
        in_hub_names = self._has_only_hub_names(forms)
        if in_hub_names:
            forms = dict(named for form in forms.values() for named in form.in_hub_names())
        if not forms.keys() <= self.shapes.keys():
            return None
        self._check({name: (one.dtype, one.shape) for name, one in forms.items()}, version)
        return FittingForms(loaded=forms, in_hub_names=in_hub_names, scales=self.scales)

    def check(self, tensor: NamedTensor, *, version: int) -> None:
        """Check the data of a tensor of a version that `fit_forms` has taken; call it on a thread.
        Raises `UnfitWeights`, `BrokenWeights`."""
        _check_size(tensor, version=version)
        _check_finite(tensor, version=version)

    def _without_drafts(self, tensors: Mapping[str, Named]) -> dict[str, Named]:
        """Leave out the draft heads that the checkpoint lacks."""
        return {
            name: one
            for name, one in tensors.items()
            if name in self.shapes or not name.startswith(_DRAFT_PREFIX)
        }

    def _fitting(self, found: Mapping[str, NamedTensor], *, version: int) -> Fitting:
        names = None
        if self._has_only_hub_names(found):
            found = {view.name: view for one in found.values() for view in one.in_hub_names()}
        elif self._converts and not found.keys() <= self.shapes.keys():
            names = self._own_names(version)
        if names is None:
            forms = {name: (one.dtype, one.shape) for name, one in found.items()}
            for tensor in found.values():
                _check_size(tensor, version=version)
        else:
            found = names.fit(found, version=version)
            forms = names.stored(found)
        self._check(forms, version)
        return Fitting(tensors=found, names=names, scales=self.scales)

    @property
    def _converts(self) -> bool:
        return self.scales is not None or not self.quantization

    def _has_only_hub_names(self, found: Mapping[str, NamedTensor | Form]) -> bool:
        """Whether the checkpoint lacks a name of a version that names the hub's tensors."""
        named = all(one.hub for one in found.values())
        return named and self._converts and not found.keys() <= self.shapes.keys()

    def _own_names(self, version: int) -> OwnNames | None:
        """Return the names of transformers' model; None if the checkpoint has the same."""
        try:
            # The library's environment has torch, the host that reads findings of it may have none.
            from services.inference.engines.tensorrt_llm.weights.own_names import own_names

            names = own_names(self.model_path)
        except (ImportError, InvalidArgument) as error:
            reason = f"{error}"
            if isinstance(error, ImportError):
                reason = f"transformers {metadata.version('transformers')} cannot, 5 can ({error})"
            raise UnfitWeights(
                f"weights {version} have other names than the checkpoint in model_path, and "
                f"nothing converts them: {reason}"
            ) from error
        return names if names.differ else None

    def _check(self, forms: Mapping[str, TypeAndShape], version: int) -> None:
        found = forms if self.scales is None else self.scales.forms(forms)
        self._check_names(found.keys(), version=version)
        for name, form in found.items():
            self._check_form(name, form, version=version)

    def _is_tied_head(self, name: str, found: Mapping[str, NamedTensor]) -> bool:
        """Whether it is a second name of the embedding, which the checkpoint does not have."""
        if not name.endswith(_HEAD) or name in self.shapes:
            return False
        embeddings = (one for key, one in found.items() if key.endswith(_EMBEDDING))
        digest = xxh3_64_intdigest(found[name].data)
        return any(xxh3_64_intdigest(one.data) == digest for one in embeddings)

    def _check_names(self, found: Set[str], *, version: int) -> None:
        missing = sorted(self.shapes.keys() - self.optional - found)
        unknown = sorted(found - self.shapes.keys())
        if missing or unknown:
            raise UnfitWeights(
                f"weights {version} are not those of the checkpoint in model_path: "
                f"{len(missing)} tensors are missing ({', '.join(missing[:_NAMED])}), "
                f"{len(unknown)} are unknown ({', '.join(unknown[:_NAMED])}){self._advice()}"
            )

    def _check_form(self, name: str, form: TypeAndShape, *, version: int) -> None:
        dtype, shape = form
        wanted = self.types[name]
        if dtype != wanted and not {dtype, wanted} <= FLOATS:
            raise UnfitWeights(
                f"weights {version}: {name} is {dtype}, the checkpoint in model_path has "
                f"{wanted}{self._advice()}"
            )
        if shape != self.shapes[name]:
            raise UnfitWeights(
                f"weights {version}: {name} is {list(shape)}, the checkpoint in model_path "
                f"has {list(self.shapes[name])}{self._advice()}"
            )

    def _advice(self) -> str:
        if not self.quantization or self.scales is not None:
            return ""
        return (
            f". The checkpoint is quantized ({self.quantization}), and nothing quantizes the "
            "trainer's tensors in this form, or for this version of the library: serve the "
            "checkpoint in 16 bits"
        )


@dataclass(frozen=True, slots=True)
class _Stored:
    """What the files of a checkpoint have, by name."""

    types: dict[str, str] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    calibrated: dict[str, NamedTensor] = field(default_factory=dict)
    """Scales of `CALIBRATED` names in float32."""

    def read(self, file: Path) -> None:
        """Add a file. Raises `OSError`, `SafetensorError`."""
        with safe_open(file, framework="numpy") as opened:
            for name in opened.keys():  # noqa: SIM118  # It is no mapping.
                part = opened.get_slice(name)
                dtype = SAFETENSORS_DTYPES.get(part.get_dtype(), part.get_dtype())
                shape = tuple(part.get_shape())
                self.types[name], self.shapes[name] = dtype, shape
                if name.endswith(CALIBRATED) and dtype == "float32":
                    data = opened.get_tensor(name).tobytes()
                    self.calibrated[name] = NamedTensor(
                        name=name, dtype=dtype, shape=shape, data=data
                    )


def read_checkpoint(model_path: str, features: Set[Feature] = frozenset()) -> Checkpoint:
    """Read the headers of a model directory, and its calibrated scales, for a library with
    `features`. Raises `ConfigError` for one without weights."""
    directory = Path(model_path)
    files = [file for file in sorted(directory.glob("*.safetensors")) if file.name not in _NO_MODEL]
    if not files:
        raise ConfigError(
            f"model_path = {model_path!r}: there is no *.safetensors in it; engine 'tensorrt_llm' "
            "loads them at its start, and compares each new version with them"
        )
    config = _read_json(directory / "config.json")
    quantization = _quantization(directory, config)
    stored = _Stored()
    for file in files:
        try:
            stored.read(file)
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"model_path = {model_path!r}: {file.name}: {error}") from None
    label, scales = _label(quantization), None
    # Versions without the hooks cannot load parts of a quantized layer.
    if quantization is not None and Feature.UPDATE_HOOKS in features:
        try:
            scales = read_quantization(quantization, stored.types, stored.shapes, stored.calibrated)
        except UnknownForm as error:
            label = ": ".join(filter(None, (label, str(error))))
    return Checkpoint(
        model_path=model_path,
        types=stored.types,
        shapes=stored.shapes,
        optional=frozenset(name for name in stored.types if _is_optional(name, config)),
        quantization=label,
        scales=scales,
    )


def _is_optional(name: str, config: Mapping[str, Any]) -> bool:
    text = {**config, **config.get("text_config", {})}
    if name.endswith(_HEAD):
        return bool(text.get("tie_word_embeddings"))
    if name.startswith(_DRAFT_PREFIX) or name.endswith("rotary_emb.inv_freq"):
        return True
    layer, layers = _LAYER.search(name), text.get("num_hidden_layers")
    return layer is not None and isinstance(layers, int) and int(layer[1]) >= layers


def _quantization(directory: Path, config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    for found in (
        config.get("quantization_config"),
        _read_json(directory / "hf_quant_config.json").get("quantization"),
    ):
        if isinstance(found, Mapping):
            return found
    return None


def _label(quantization: Mapping[str, Any] | None) -> str:
    if quantization is None:
        return ""
    name = quantization.get("quant_algo") or quantization.get("quant_method")
    return str(name or "by its configuration")


def _read_json(file: Path) -> dict[str, Any]:
    """Return a JSON object; empty without the file."""
    try:
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: {error}") from None
    return found


def _check_size(tensor: NamedTensor, *, version: int) -> None:
    size = math.prod(tensor.shape) * _ITEM_BYTES.get(tensor.dtype, 0)
    if memoryview(tensor.data).nbytes != size:
        raise UnfitWeights(
            f"weights {version}: {tensor.name} has {memoryview(tensor.data).nbytes} bytes, "
            f"{tensor.dtype} of shape {list(tensor.shape)} has {size}"
        )


def is_rounded(types: Iterable[str]) -> bool:
    """Whether a tensor has 16 bits."""
    return any(one in _ROUNDED for one in types)


def _check_finite(tensor: NamedTensor, *, version: int) -> None:
    if tensor.dtype in FLOATS and not _is_finite(tensor):
        raise BrokenWeights(f"weights {version}: {tensor.name} has NaN or infinity")


def _is_finite(tensor: NamedTensor) -> bool:
    # The library's environment has torch, the host that reads findings of it may have none.
    from services.inference.engines.tensor_bytes import from_named, is_finite

    return is_finite(from_named(tensor))
