"""Checkpoints with quantized matrices, and a trainer's tensors in their form.

A trainer publishes matrices in 16 or 32 bits. Each becomes what the checkpoint has in its place:
numbers and scales (`matrix_forms`). What only calibration finds, the scales of activations and of
keys and values, stays that of the checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

from forge.core.named_tensor import NamedTensor
from services.inference.engines.tensorrt_llm.weights.matrix_forms import (
    E4M3,
    PACKED,
    BlockForm,
    MatrixForm,
    PackedForm,
    TensorForm,
    TypeAndShape,
)

FLOATS = frozenset({"float64", "float32", "bfloat16", "float16"})
"""A cast between these keeps the values; one to fewer bits needs scales."""
CALIBRATED = (".input_scale", ".k_scale", ".v_scale")
"""Ends of the names of scales that no weights give."""

_POWERS_OF_TWO = "ue8m0"
_WEIGHT = ".weight"
_SCALARS: tuple[tuple[int, ...], ...] = ((), (1,))
_MODELOPT: Mapping[str, tuple[type[TensorForm | PackedForm], str]] = {
    "FP8": (TensorForm, "_scale"),
    "NVFP4": (PackedForm, "_scale_2"),
}
"""The form of an algorithm of ModelOpt, and the suffix of its scale of a whole tensor."""


class UnknownForm(Exception):
    """Nothing quantizes tensors in the form of a checkpoint. The text says why, "" if the name of
    the quantization does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """The quantization of a checkpoint."""

    form: MatrixForm
    matrices: frozenset[str]
    """Names of the quantized tensors."""
    groups: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """By name, the matrices that share the scale of a whole tensor, if there are others."""
    calibrated: Mapping[str, tuple[NamedTensor, ...]] = field(default_factory=dict)
    """Tensors of the checkpoint that go with a weight, by its name."""

    def forms(self, found: Mapping[str, TypeAndShape]) -> dict[str, TypeAndShape]:
        """Return what becomes of tensors by name: those of `matrices` that are not quantized
        get scales beside them, and floats another type; weights get what calibration has found."""
        forms = dict(found)
        for name in self.matrices & found.keys():
            dtype, shape = found[name]
            if dtype != self.form.dtype and len(shape) == 2:
                stored = self.form.stored(shape)
                forms |= {name + suffix: form for suffix, form in stored.items()}
                if dtype not in FLOATS:
                    forms[name] = dtype, shape
        for name in self.calibrated.keys() & found.keys():
            for one in self.calibrated[name]:
                forms.setdefault(one.name, (one.dtype, one.shape))
        return forms

    def converted(self, tensors: Iterable[NamedTensor], own: Set[str]) -> Iterator[NamedTensor]:
        """Yield tensors whose `forms` have been checked, as the checkpoint has them. Quantized ones
        are copied, one at a time. `own`: names that the version has itself."""
        waiting: dict[frozenset[str], list[NamedTensor]] = {}
        for tensor in tensors:
            yield from (one for one in self.calibrated.get(tensor.name, ()) if one.name not in own)
            if tensor.name not in self.matrices or tensor.dtype == self.form.dtype:
                yield tensor
                continue
            group = self.groups.get(tensor.name, frozenset({tensor.name}))
            held = waiting.setdefault(group, [])
            held.append(tensor)
            if len(held) == len(group):
                yield from self._narrowed(waiting.pop(group))
        # The version has the other matrices of these groups in quantized form.
        for held in waiting.values():
            yield from self._narrowed(held)

    def _narrowed(self, tensors: list[NamedTensor]) -> Iterator[NamedTensor]:
        from services.inference.engines.tensor_bytes import from_named, raw_bytes

        narrowed = self.form.narrowed([from_named(one) for one in tensors])
        for tensor, parts in zip(tensors, narrowed, strict=True):
            for suffix, part in parts.items():
                yield NamedTensor(
                    name=tensor.name + suffix,
                    dtype=f"{part.dtype}".removeprefix("torch."),
                    shape=tuple(part.shape),
                    data=raw_bytes(part),
                )


def read_quantization(
    config: Mapping[str, Any],
    types: Mapping[str, str],
    shapes: Mapping[str, tuple[int, ...]],
    calibrated: Mapping[str, NamedTensor],
) -> Quantization:
    """Return the quantization that a configuration and the tensors of a checkpoint describe.
    `calibrated`: the tensors of `CALIBRATED` names. Raises `UnknownForm`."""
    match config:
        case {"quant_method": "fp8", "weight_block_size": [int(high), int(wide)]}:
            return _by_blocks(config, (high, wide), types, shapes)
        case {"quant_algo": "FP8" | "NVFP4" as algorithm}:
            return _of_modelopt(algorithm, types, shapes, calibrated)
    raise UnknownForm


def _by_blocks(
    config: Mapping[str, Any],
    block: tuple[int, int],
    types: Mapping[str, str],
    shapes: Mapping[str, tuple[int, ...]],
) -> Quantization:
    if min(block) <= 0:
        raise UnknownForm
    for name in _calibrated_names(types):
        raise UnknownForm(f"{name} is a scale of calibration beside scales of blocks")
    form = BlockForm(block=block, powers_of_two=config.get("scale_fmt") == _POWERS_OF_TWO)
    found = (name for name in types if types[name] == E4M3 and len(shapes[name]) == 2)
    return Quantization(
        form=form, matrices=frozenset(name for name in found if f"{name}_scale_inv" in types)
    )


def _of_modelopt(
    algorithm: str,
    types: Mapping[str, str],
    shapes: Mapping[str, tuple[int, ...]],
    calibrated: Mapping[str, NamedTensor],
) -> Quantization:
    kind, suffix = _MODELOPT[algorithm]
    first = next((name for name in types if name.endswith(_WEIGHT + suffix)), "")
    if shapes.get(first) not in _SCALARS:
        raise UnknownForm("no matrix has one scale for the whole tensor")
    form = kind(scalar=shapes[first])
    matrices = frozenset(_checked(form, types, shapes))
    for name in sorted(matrices):
        if _input_scale(name) not in calibrated:
            raise UnknownForm(f"{_input_scale(name)} is missing, or not in float32")
    return Quantization(
        form=form,
        matrices=matrices,
        groups=_groups(matrices, calibrated),
        calibrated=_by_weight(types, calibrated),
    )


def _by_weight(
    types: Mapping[str, str], calibrated: Mapping[str, NamedTensor]
) -> dict[str, tuple[NamedTensor, ...]]:
    """Return the scales that go with each weight. Raises `UnknownForm` for one that no version can
    get from a weight."""
    found: dict[str, tuple[NamedTensor, ...]] = {}
    for name in _calibrated_names(types):
        weight = name.rpartition(".")[0] + _WEIGHT
        if weight not in types:
            raise UnknownForm(f"{name} belongs to no matrix: there is no {weight}")
        if name not in calibrated:
            raise UnknownForm(f"{name} is in {types[name]}, not in float32")
        found[weight] = (*found.get(weight, ()), calibrated[name])
    return found


def _calibrated_names(types: Mapping[str, str]) -> list[str]:
    return sorted(name for name in types if name.endswith(CALIBRATED))


def _checked(
    form: MatrixForm, types: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[str]:
    """Yield the names of quantized matrices. Raises `UnknownForm` for one in another form."""
    scales = {name for name in types if name.endswith(f"{_WEIGHT}_scale")}
    for name in sorted(types.keys() - scales):
        if types[name] not in (E4M3, PACKED):
            continue
        stored: Mapping[str, TypeAndShape] = {}
        if types[name] == form.dtype and name.endswith(_WEIGHT) and len(shapes[name]) == 2:
            rows, columns = shapes[name]
            stored = form.stored((rows, columns * 2 if form.dtype == PACKED else columns))
        parts = {name + suffix: shape for suffix, (_, shape) in stored.items()}
        if not parts or any(shapes.get(part) != shape for part, shape in parts.items()):
            raise UnknownForm(f"{name} has another form")
        yield name


def _groups(matrices: Set[str], calibrated: Mapping[str, NamedTensor]) -> dict[str, frozenset[str]]:
    """Return the matrices of one module that have the same input, so the same scale of it. Of such
    ones the library makes one matrix (query, key and value; gate and up), which has one scale of
    the whole tensor. It asserts that they are equal (NVFP4), or rounds a second time (FP8)."""
    found: dict[tuple[str, bytes], set[str]] = {}
    for name in matrices:
        module = name.removesuffix(_WEIGHT).rpartition(".")[0]
        scale = bytes(calibrated[_input_scale(name)].data)
        found.setdefault((module, scale), set()).add(name)
    return {name: frozenset(group) for group in found.values() for name in group}


def _input_scale(matrix: str) -> str:
    return f"{matrix.removesuffix(_WEIGHT)}.input_scale"
