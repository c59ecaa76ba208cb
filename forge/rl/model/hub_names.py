"""The tensors of a model under the names and in the shapes of its checkpoint on the hub.

transformers changes some families as it loads them: it stacks experts, joins matrices and renames
modules. Owns the way back, as `save_pretrained` takes it, for a part of the tensors at a time; and
where the tensors of the hub are in the model's own, for readers without transformers. The rules are
those of the installed transformers; nothing here knows a family.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from forge.core.errors import InvalidArgument
from forge.core.named_tensor import HubPart, HubParts

_LAYER = re.compile(r".*?\.\d+(?=\.)")
"""The beginning of a name up to the number of its layer."""
_NUMBER = re.compile(r"(.*\.)(0|[1-9]\d*)(\..*)")
"""The last number in a name: of experts their own."""
_WIDTH = 4
"""Elements of a row that stand for all: enough to notice a row in another order."""
_NO_WAY_BACK = (
    *(NotImplementedError, AttributeError, ValueError, KeyError, RuntimeError, StopIteration),
)


class HubNames:
    """The way from a model's own names to those of the hub. Layers are converted one by one, so
    only one of them has a second copy in memory."""

    def __init__(self, model: Any) -> None:
        """`model`: built from its configuration; it needs no memory (meta device).

        Raises `InvalidArgument` if transformers cannot write what it reads.
        """
        self._model = model
        own = {name: tensor.to("meta") for name, tensor in model.state_dict().items()}
        self._shapes = _shapes(own)
        try:
            self._hub_shapes = _shapes(revert_weight_conversion(model, own))
            by_part = [
                (part, _shapes({name: own[name] for name in names}), self._reverted(own, names))
                for part, names in _parts(own).items()
            ]
        except _NO_WAY_BACK as error:
            raise InvalidArgument(
                f"transformers has no way back to the hub's names of {type(model).__name__}: "
                f"{type(error).__name__}: {error}"
            ) from error
        self._changed = {part for part, before, one in by_part if before != _shapes(one)}
        """Parts with other names or shapes on the hub."""
        found = {name: shape for *_, one in by_part for name, shape in _shapes(one).items()}
        if found != self._hub_shapes:
            raise InvalidArgument(
                f"{type(model).__name__} has tensors on the hub that join several layers"
            )

    @classmethod
    def of(cls, directory: Path) -> HubNames:
        """The way for the model in a directory. Raises one of transformers' errors for its
        configuration, too."""
        with torch.device("meta"):
            config = AutoConfig.from_pretrained(directory)
            # Another type would be torch's default meanwhile, for all threads.
            return cls(AutoModelForCausalLM.from_config(config, dtype=torch.float32))

    @property
    def own(self) -> bool:
        """Whether the hub has the model's own names and shapes."""
        return not self._changed

    def converted(
        self, names: Iterable[str], read: Callable[[str], Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of these names as the hub has them, contiguous; `read` returns one by
        its own name. Tensors that stay as they are are not copied."""
        for part, own in _parts(names).items():
            if part not in self._changed:
                yield from ((name, read(name)) for name in own)
                continue
            tensors = self._reverted({name: read(name) for name in own}, own)
            yield from ((name, one.contiguous()) for name, one in tensors.items())

    def parts(self, shapes: Mapping[str, Sequence[int]]) -> HubParts:
        """Return where the tensors of the hub are in those of these names and shapes: by own name,
        for each that has another name or shape there.

        Raises `InvalidArgument` if one is no range of the elements of one tensor, and for tensors
        that are not the model's.
        """
        found: HubParts = {}
        for name, shape in shapes.items():
            if self._shapes.get(name) != torch.Size(shape):
                raise InvalidArgument(f"{name} of shape {list(shape)} is not in the model")
        layers = [
            {name: _few(self._shapes[name]) for name in own} for own in _parts(shapes).values()
        ]
        # One run for all: its memory costs more time than the numbers.
        most = max((sum(map(math.prod, few.values())) for few in layers), default=0)
        run = torch.arange(most, dtype=torch.int32)
        try:
            for few in layers:
                found |= self._ranges(few, run)
        except (*_NO_WAY_BACK, IndexError) as error:
            raise InvalidArgument(f"tensors of the hub are no ranges: {error!r}") from error
        return {
            name: parts
            for name, parts in found.items()
            if parts != (HubPart(name, tuple(self._shapes[name])),)
        }

    def _ranges(
        self, layer: Mapping[str, Sequence[int]], run: Tensor
    ) -> dict[str, tuple[HubPart, ...]]:
        """The parts of each tensor of one layer. Raises `ValueError` if the hub has other data, or
        a tensor that is no range of one of them.

        Reverts numbers of `run` in place of values, of each row the first few: in the shapes of
        `layer`, by name.
        """
        names, few = list(layer), list(layer.values())
        shapes = [self._shapes[name] for name in names]
        ends = [0, *accumulate(map(math.prod, few))]
        numbers = {
            name: run[start:end].view(tuple(one))
            for name, (start, end), one in zip(names, pairwise(ends), few, strict=True)
        }
        reverted = self._reverted(numbers, names)
        ranges: dict[str, list[tuple[str, torch.Size, int]]] = {name: [] for name in names}
        end = 0
        for hub, found in sorted(reverted.items(), key=lambda one: int(one[1].flatten()[0])):
            start, end = end, end + found.numel()
            own = bisect_right(ends, start) - 1
            shape = found.shape
            if shapes[own] != few[own] and shape[-1:] == few[own][-1:]:
                shape = torch.Size((*shape[:-1], shapes[own][-1]))
            in_order = found.dtype == run.dtype and torch.equal(found.flatten(), run[start:end])
            if not in_order or end > ends[own + 1] or shape != self._hub_shapes[hub]:
                raise ValueError(f"{hub}, or another of its layer, is no range of one tensor")
            first = (start - ends[own]) * shapes[own].numel() // math.prod(few[own])
            ranges[names[own]].append((hub, shape, first))
        if end != ends[-1]:
            raise ValueError("the hub lacks data")
        return {name: _folded(one) for name, one in ranges.items()}

    @torch.no_grad()
    def _reverted(self, tensors: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = revert_weight_conversion(
            self._model, {name: tensors[name] for name in names}
        )
        return found


def _few(shape: torch.Size) -> torch.Size:
    """The shape of the first elements of each row."""
    return torch.Size((*shape[:-1], min(shape[-1], _WIDTH))) if shape[1:] else shape


def _parts(names: Iterable[str]) -> dict[str, list[str]]:
    """Names by the layer that they belong to; "" is the part of all others."""
    parts: dict[str, list[str]] = {}
    for name in names:
        found = _LAYER.match(name)
        parts.setdefault(found.group() if found else "", []).append(name)
    return parts


def _folded(ranges: Iterable[tuple[str, torch.Size, int]]) -> tuple[HubPart, ...]:
    """Parts for ranges in order (name, shape, first element): one for all experts at equal
    distances."""
    groups: dict[tuple[str, torch.Size], list[tuple[str, int]]] = {}
    for name, shape, start in ranges:
        groups.setdefault((_NUMBER.sub(r"\1{}\3", name), shape), []).append((name, start))
    parts: list[HubPart] = []
    for (name, shape), places in groups.items():
        first, count = places[0][1], len(places)
        one = HubPart(
            name, tuple(shape), first, (places[-1][1] - first) // max(1, count - 1), count
        )
        if count > 1 and one.places == places:
            parts.append(one)
        else:
            parts.extend(HubPart(name, tuple(shape), start) for name, start in places)
    return tuple(parts)


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tensors.items()}
