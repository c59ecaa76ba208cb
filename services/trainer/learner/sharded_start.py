"""The starting weights of a rank; of ranks that shard a model, without a copy of it on each.

Owns a model whose parameters have no memory, filling their shards, and the types that frozen
weights have. `forge.rl.parallel.sharding` divides the parameters in between: their memory is that
of the shards.

    files with the model's own names    each rank reads the ranges of its shards
    other names or formats, which       rank 0 loads the whole model, and sends each tensor
    transformers converts (experts)
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoConfig, AutoModelForCausalLM

from forge.core.errors import DataLoss, InvalidArgument
from forge.rl.model.narrow_layers import widen_layers
from forge.rl.numerics import store_frozen_narrow
from forge.rl.parallel.sharding import local
from forge.rl.parallel.world import World
from forge.runtime.telemetry import log
from services.trainer.checkpoint.shards import fill, sizes_in, types_in
from services.trainer.model.full_weights import load_model, own_tensors, require_model
from services.trainer.model.lora import base_name, base_tensors


def empty_model(path: Path) -> Any:
    """The model in a directory like `load_model`, but with parameters on the meta device. Buffers
    have their values: those that no file has are computed from the configuration. Quantized models
    are loaded whole: their tensors are not those of the files.

    Raises like `load_model`.
    """
    require_model(path)
    try:
        config = AutoConfig.from_pretrained(path)
        if getattr(config, "quantization_config", None):
            return load_model(path)
        with _parameters_without_memory():
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except (OSError, ValueError, RuntimeError) as error:
        raise InvalidArgument(f"model_path = {str(path)!r}: {error}") from error
    return model.eval()


@contextmanager
def _parameters_without_memory() -> Iterator[None]:
    """Context in which modules move parameters to the meta device as they are registered: only
    buffers are computed. It holds for all threads of the process."""
    register = nn.Module.register_parameter

    def without_memory(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        # A tied parameter is registered again, and must stay the same object.
        if parameter is not None and not parameter.is_meta:
            moved = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
            parameter = moved
        register(module, name, parameter)

    nn.Module.register_parameter = without_memory  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def place(model: Any, path: Path, *, device: torch.device, autocast: torch.dtype | None) -> None:
    """Move the model of the directory `path` to a device, with frozen matrices in the type of
    autocast where this changes no value. An `empty_model` stays without memory.

    Raises `InvalidArgument` for damaged files.
    """
    empty = without_weights(model)
    if autocast is not None and not all(one.requires_grad for one in model.parameters()):
        lossless = _same_in_files(model, path, autocast) if empty else None
        store_frozen_narrow(model, autocast, lossless=lossless)
        widen_layers(model)
    if not empty:
        model.to(device)


def without_weights(model: Any) -> bool:
    """Whether `fill_shards` has still to give the model its weights."""
    return any(one.is_meta for one in model.parameters())


def _same_in_files(model: Any, path: Path, dtype: torch.dtype) -> Callable[[nn.Parameter], bool]:
    """Whether the files have a parameter in a type; where their names are others, whether they have
    all in it."""
    with _as_invalid(path):
        files = weight_files(path)
        types = types_in(files)
        names = _names_in_files(model, base_tensors(model), sizes_in(files))
    if names is None:
        every = {*types.values()} == {dtype}
        return lambda one: every
    own = {id(one): base_name(name) for name, one in model.named_parameters()}
    return lambda one: types[names[own[id(one)]]] == dtype


def fill_shards(model: Any, path: Path, world: World, device: torch.device) -> None:
    """Give a sharded `empty_model` memory on `device`, and the weights in the directory `path`. All
    ranks call it.

    Raises `InvalidArgument` for damaged files.
    """
    _allocate(model, device)
    tensors = base_tensors(model)
    with _as_invalid(path):
        files = weight_files(path)
        names = _names_in_files(model, tensors, sizes_in(files))
        if names is not None:
            fill({names[name]: tensor for name, tensor in tensors.items()}, files)
            return
    source: dict[str, Tensor] = {}
    if world.rank == 0:
        log.info("weights_sent_by_rank_0", model_path=str(path))
        # In float32 a model in 16 bits would take twice the host's memory.
        source = own_tensors(load_model(path, dtype=_stored_type(files)))
    # The load may take longer than the groups of a mesh wait; the group of all waits without limit.
    dist.broadcast_object_list([None], src=0)
    _send(tensors, source)


def _stored_type(files: Sequence[Path]) -> torch.dtype:
    """A type that has every value of the files; float32 without files of safetensors."""
    with_files = {torch.float32} if not files else {*types_in(files).values()}
    return reduce(torch.promote_types, with_files)


@contextmanager
def _as_invalid(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError, ValueError, KeyError, DataLoss) as error:
        raise InvalidArgument(f"model_path = {str(path)!r}: {error}") from error


def _allocate(model: nn.Module, device: torch.device) -> None:
    """Memory for the parameters; tied ones stay tied."""
    tied: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        tied[id(parameter)].append(name)

    def allocated(one: Tensor) -> Tensor:
        return torch.empty_like(one, device=device) if one.is_meta else one.to(device)

    # As `to_empty` does, which would clear the buffers.
    model._apply(allocated)  # type: ignore[no-untyped-call]
    for first, *others in tied.values():
        for name in others:
            module, _, own = name.rpartition(".")
            setattr(model.get_submodule(module), own, model.get_parameter(first))


def weight_files(path: Path) -> list[Path]:
    """The safetensors files of a model directory; none if it has other ones."""
    index = path / "model.safetensors.index.json"
    if index.is_file():
        weight_map: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return [path / name for name in sorted({*weight_map.values()})]
    return [one for one in (path / "model.safetensors",) if one.is_file()]


def _names_in_files(
    model: nn.Module, tensors: Mapping[str, Tensor], found: Mapping[str, list[int]]
) -> dict[str, str] | None:
    """The name in the files of each tensor, which may be that of a tied one; None if one is missing
    or has another shape."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    names: dict[str, str] = {}
    for name, tensor in tensors.items():
        own = parameters.get(name)
        aliases = [name, *(one for one, each in parameters.items() if each is own)]
        known = [one for one in aliases if found.get(one) == list(tensor.shape)]
        if not known:
            return None
        names[name] = known[0]
    return names


@torch.no_grad()
def _send(tensors: Mapping[str, Tensor], source: Mapping[str, Tensor]) -> None:
    """Fill tensors from the whole ones of rank 0, one at a time."""
    ranks = dist.get_world_size()
    for name, tensor in tensors.items():
        whole = source[name] if source else torch.empty(tensor.shape)
        sent = whole.to(tensor.device, tensor.dtype)
        divided = tensor if isinstance(tensor, DTensor) else None
        # Rank 0 is in one of several meshes where parts of a layer (`mesh.tp`) share a tensor.
        scatters = divided is not None and divided.device_mesh.size() == ranks
        if not scatters:
            dist.broadcast(sent, src=0)
        if divided is not None:
            sent = distribute_tensor(
                sent,
                divided.device_mesh,
                divided.placements,
                src_data_rank=0 if scatters else None,
            )
        local(tensor).copy_(local(sent))
