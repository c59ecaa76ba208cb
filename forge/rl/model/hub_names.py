"""The tensors of a model under the names and in the shapes of its checkpoint on the hub.

transformers changes some families as it loads them: it stacks experts, joins matrices and renames
modules. Owns the way back, as `save_pretrained` takes it, for a part of the tensors at a time. The
rules are those of the installed transformers; nothing here knows a family.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from forge.core.errors import InvalidArgument

_LAYER = re.compile(r".*?\.\d+(?=\.)")
"""The beginning of a name up to the number of its layer."""
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
        try:
            whole = _shapes(revert_weight_conversion(model, own))
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
        if found != whole:
            raise InvalidArgument(
                f"{type(model).__name__} has tensors on the hub that join several layers"
            )

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

    @torch.no_grad()
    def _reverted(self, tensors: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = revert_weight_conversion(
            self._model, {name: tensors[name] for name in names}
        )
        return found


def _parts(names: Iterable[str]) -> dict[str, list[str]]:
    """Names by the layer that they belong to; "" is the part of all others."""
    parts: dict[str, list[str]] = {}
    for name in names:
        found = _LAYER.match(name)
        parts.setdefault(found.group() if found else "", []).append(name)
    return parts


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tensors.items()}
