"""New weights on their way to vLLM: checked against the model, then in memory for its process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from xxhash import xxh3_64_intdigest

from forge.core.errors import InvalidArgument, ResourceExhausted
from forge.core.named_tensor import NamedTensor, hub_ranges
from forge.rl.model.hub_names import HubNames
from forge.rl.mtp.heads import MtpHeads
from forge.runtime.telemetry import log
from services.inference.engines.base import BrokenWeights
from services.inference.engines.tensor_bytes import NAMES, from_named, is_finite, raw_bytes
from services.inference.engines.threads import run_to_end
from services.inference.engines.vllm.exchange.shared_memory import SharedMemory
from services.inference.engines.weight_checks import (
    DRAFT_PREFIX,
    check_tensor,
    match_names,
    weights_of,
)

_ALIGNED = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """Checked weights: the first name of each, in the model's order. vLLM gets them as the hub has
    them, which its loaders read."""

    version: int
    tensors: tuple[NamedTensor, ...]
    rounded: bool
    """Published or served in 16 bits."""
    as_published: bool
    """vLLM computes with the published values, in float32."""
    hub: HubNames | None
    """For tensors without names of the hub; None: vLLM gets the model's own names."""
    heads: tuple[NamedTensor, ...] = ()
    """Draft heads to draft with."""

    def loaded(self) -> Iterator[NamedTensor]:
        """Yield what vLLM loads: views by the names of the manifest. Without these, transformers
        converts, and copies experts, one layer at a time."""
        if all(tensor.hub for tensor in self.tensors):
            for tensor in self.tensors:
                yield from tensor.in_hub_names()
            yield from self.heads
            return
        own = {tensor.name: tensor for tensor in self.tensors}
        for name, one in _converted(self.hub, own, lambda name: from_named(own[name])):
            dtype, shape = NAMES[one.dtype], tuple(one.shape)
            yield NamedTensor(name=name, dtype=dtype, shape=shape, data=raw_bytes(one))
        yield from self.heads


class Checkpoint:
    """Tensors of a checkpoint of the model: names, shapes, ties."""

    def __init__(
        self, model: torch.nn.Module, *, served: torch.dtype, drafts: bool = False
    ) -> None:
        """`model`: of transformers, without data. `served`: the type that vLLM computes in.
        `drafts`: whether to take draft heads."""
        self._weights = weights_of(model)
        self._served = served
        self._hub = _hub_names(model)
        self._heads = _Heads(model) if drafts else None

    @cached_property
    def tensors(self) -> list[tuple[str, str, list[int]]]:
        """Name, dtype and shape of each tensor that vLLM loads: the start tries a load of them."""
        own = {one.names[0]: torch.empty_like(one.tensor, device="meta") for one in self._weights}
        return [
            (name, NAMES[tensor.dtype], list(tensor.shape))
            for name, tensor in _converted(self._hub, own, own.__getitem__)
        ]

    def stage(self, tensors: Mapping[str, NamedTensor], *, version: int) -> Staged:
        """Check a set of weights. Tied weights may have any or all of their names; draft heads are
        left out if they do not fit, or if vLLM does not draft. Raises UnfitWeights, BrokenWeights
        for NaN or infinity."""
        names = match_names([w.names for w in self._weights], tensors, version=version)
        rounded = self._served.itemsize < 4
        staged = []
        for name, weight in zip(names, self._weights, strict=True):
            tensor = check_tensor(
                tensors[name], shape=weight.tensor.shape, dtype=weight.tensor.dtype, version=version
            )
            if tensor.is_floating_point() and not is_finite(tensor):
                raise BrokenWeights(f"weights {version}: {name} has NaN or infinity")
            rounded |= tensor.is_floating_point() and tensor.dtype.itemsize < 4
            first = weight.names[0]
            # The manifest has names for the published one of tied names.
            hub = tensors[name].hub if name == first else ()
            staged.append(replace(tensors[name], name=first, hub=hub))
        if self._hub is not None and not self._has_tried_names(staged):
            staged = [replace(one, hub=()) for one in staged]
        heads = self._heads.checked(tensors, version=version) if self._heads is not None else ()
        return Staged(
            version=version,
            tensors=tuple(staged),
            rounded=rounded,
            as_published=self._served == torch.float32,
            hub=self._hub,
            heads=heads,
        )

    def _has_tried_names(self, tensors: Iterable[NamedTensor]) -> bool:
        """Whether the manifest has the names and shapes of `self.tensors`: a trainer with another
        version of transformers may have others, with which no load was tried."""
        tried = {name: tuple(shape) for name, _, shape in self.tensors}
        parts = (part for one in tensors for part in hub_ranges(one.hub, item_bytes=1))
        return {name: shape for name, shape, _ in parts} == tried


def _hub_names(model: Any) -> HubNames | None:
    """None for a model that transformers cannot write as it reads it."""
    try:
        return HubNames(model)
    except InvalidArgument as error:
        log.warning("vllm_gets_own_names", reason=str(error))
        return None


def _converted(
    hub: HubNames | None, names: Iterable[str], read: Callable[[str], torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    if hub is None:
        return ((name, read(name)) for name in names)
    return hub.converted(names, read)


class _Heads:
    """The draft heads that a model can have."""

    def __init__(self, model: Any) -> None:
        embedding = model.get_input_embeddings().weight
        head = model.get_output_embeddings()
        self._embedding_channels: int = embedding.shape[1]
        self._channels: int = (embedding if head is None else head.weight).shape[1]
        self._note = ""

    def checked(
        self, tensors: Mapping[str, NamedTensor], *, version: int
    ) -> tuple[NamedTensor, ...]:
        """Return those among the weights that fit; log a reason once, until it changes."""
        found = {name: one for name, one in tensors.items() if name.startswith(DRAFT_PREFIX)}
        note = "" if found else "the weights have no draft heads"
        try:
            if found:
                self._check({name: from_named(one) for name, one in found.items()})
        except InvalidArgument as error:
            note, found = str(error), {}
        if note != self._note:
            self._note = note
            event = "draft_heads_not_served" if note else "draft_heads_served"
            log.info(event, weight_version=version, reason=note)
        return tuple(found.values())

    def _check(self, tensors: Mapping[str, torch.Tensor]) -> None:
        MtpHeads.of(tensors, channels=self._channels, embedding_channels=self._embedding_channels)
        if not all(is_finite(one) for one in tensors.values()):
            raise InvalidArgument("MTP heads have NaN or infinity")


@asynccontextmanager
async def copied(staged: Staged) -> AsyncIterator[dict[str, Any]]:
    """Copy as `shared` on a thread, while the event loop serves. Raises ResourceExhausted without
    memory for it."""
    with ExitStack() as stack:
        try:
            update = await run_to_end(partial(stack.enter_context, shared(staged)))
        except OSError as error:
            raise ResourceExhausted(
                f"weights {staged.version} could not be copied for vLLM: {error}"
            ) from error
        yield update


@contextmanager
def shared(staged: Staged) -> Iterator[dict[str, Any]]:
    """Copy the weights to memory that vLLM's process can open; yield the update that names it.
    Raises OSError without memory for them."""
    memory, entries, end = SharedMemory("forge-weights"), [], 0
    try:
        for tensor in staged.loaded():
            start = -(-end // _ALIGNED) * _ALIGNED
            memory.write(tensor.data, at=start)
            end = start + len(tensor.data)
            checksum = xxh3_64_intdigest(tensor.data)
            what = tensor.name, tensor.dtype, list(tensor.shape)
            entries.append((*what, start, len(tensor.data), checksum))
        yield {"address": memory.address, "tensors": entries}
    finally:
        memory.close()
