"""The memory of a rank, estimated before a run: weights, optimizer, activations, head.

Owns the estimate and the search for a mesh that fits. It runs no step: the model is built of
tensors without data, divided over parts like a real one, and the activations are those that
autograd keeps of a forward of such tensors. Not estimated: what the allocator wastes, buffers of
NCCL, and CUDA's own context.

    bytes of a rank = (weights 4 + gradient 4 + optimizer) / shards    of fp32 master weights
                    + (weights 4 or 2) / shards                        of frozen ones
                    + gathered units                                   with several shards
                    + activations of a pass + head

Frozen weights are those of a reference and of a teacher, and with LoRA all but the adapters.
Matrices among them take 2 bytes where the model directory has them in bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from forge.core.errors import InvalidArgument
from forge.rl import numerics
from forge.rl.config import MeshShape, OptimizerName
from forge.rl.model.capabilities import attention_channels, pair_cost, prefix_cost
from forge.rl.model.forked_states import NO_PARTS, is_recurrent
from forge.rl.model.head_logprobs import kept_elements, table_rows
from forge.rl.parallel.partition import largest_range
from forge.rl.parallel.sharding import divide, layers_of, local
from services.trainer.model.lora import inject
from services.trainer.setting_tables import LoraSettings

GIB = 1 << 30
MOMENTS = {"adamw": 8.0, "adamw_8bit": 2.0, "muon": 4.0}
"""Bytes of the optimizer per weight; muon: those of a matrix."""
_PROBED_TOKENS = (64, 128)


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Numbers of weights of some modules, or a rank's mean share of them."""

    all: float = 0
    trained: float = 0
    narrow: float = 0
    """Frozen ones that a rank keeps in 16 bits."""

    @property
    def bytes(self) -> float:
        """Memory of the weights."""
        return 4.0 * self.all - 2.0 * self.narrow

    def __add__(self, other: Weights) -> Weights:
        return Weights(
            all=self.all + other.all,
            trained=self.trained + other.trained,
            narrow=self.narrow + other.narrow,
        )

    def __mul__(self, factor: float) -> Weights:
        return Weights(
            all=self.all * factor, trained=self.trained * factor, narrow=self.narrow * factor
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """Facts of a model that determine memory, on one of its parts (`mesh.tp`)."""

    parts: int
    weights: float
    """Of the whole model, with adapters."""
    adapters: bool
    """Adapters are trained, and no other weights."""
    layers: int
    in_layers: Weights
    """Parameters of the layers that one part holds."""
    largest_layer: Weights
    """Parameters of the largest layer that one part holds."""
    outside: Weights
    """Parameters outside of layers: embedding, last norm, head; tied ones once."""
    vocabulary: int
    channels: int
    pair_cost: float
    """Work of a pair of tokens in attention, relative to that of a token."""
    prefix_cost: float
    """Memory of a token of another rank's range, relative to that of an own one."""
    activation_bytes: float
    """Bytes per token that autograd keeps of all layers, in the type of the passes."""
    exact: bool
    """`activation_bytes` was found by a forward; else it is a rule of thumb for dense layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySettings:
    """Settings that determine memory."""

    shape: MeshShape
    context: int
    """Tokens of the largest tree or sample of a pass."""
    bfloat16: bool = True
    """autocast and publish_dtype are bfloat16."""
    recompute: float = 0.0
    """Share of the layers with recomputed activations."""
    optimizer: OptimizerName = "adamw"
    frozen: tuple[ModelSize, ...] = ()
    """Models beside the policy: a reference, a teacher, none of whose weights is trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Bytes of one rank at the peak of a step."""

    weights: float
    gradients: float
    optimizer: float
    gathered: float
    """Whole units of sharded weights and their gradients; without shards, copies in the type of
    autocast."""
    rounded: float
    """Master values of the weights that a step computes with rounded."""
    activations: float
    head: float
    frozen: float
    """Weights of a reference and a teacher, and their gathered units."""

    @property
    def total(self) -> float:
        """All of them."""
        parts: list[float] = [getattr(self, name) for name in Estimate.__dataclass_fields__]
        return sum(parts)


def size_of(
    config: Any,
    *,
    bfloat16: bool,
    tp: int = 1,
    lora: LoraSettings | None = None,
    frozen: bool = False,
) -> ModelSize:
    """The size of one of `tp` parts of the model of a transformers configuration, with the adapters
    of `lora`, or of a `frozen` model; takes no memory for its weights. Raises `InvalidArgument` for
    a model that `tp` parts cannot divide, `ConfigError` for targets that it does not have."""
    # Before the model: it writes its own type into the configuration.
    of_16_bits = bfloat16 and getattr(config, "dtype", None) == torch.bfloat16
    model = _outline(config, lora, frozen=frozen)
    count = partial(_count, narrow=numerics.matrices(model) if of_16_bits else ())
    whole = count(model)
    outside = whole + _sum(map(count, layers_of(model))) * -1
    # The mesh first: it reads tensors of its own.
    with _mesh_of(tp) as mesh, FakeTensorMode(allow_non_fake_inputs=True):
        _allocate_nothing(model)
        if bfloat16:
            numerics.patch(model)
        if mesh is not None and any(map(is_recurrent, model.modules())):
            raise InvalidArgument(
                f"mesh.tp = {tp} is not allowed for {type(model).__name__}: {NO_PARTS}"
            )
        if mesh is not None:
            divide(model, mesh)
        count = partial(_count, narrow=numerics.matrices(model) if of_16_bits else ())
        layers = [count(layer) for layer in layers_of(model)]
        per_token = _kept_per_token(model, tp=tp, bfloat16=bfloat16)
    text = config.get_text_config(decoder=True)
    rule = partial(_rule_of_thumb, text, len(layers), bfloat16=bfloat16, tp=tp)
    return ModelSize(
        parts=tp,
        weights=whole.all,
        adapters=lora is not None,
        layers=len(layers),
        in_layers=_sum(layers),
        largest_layer=max(layers, key=lambda one: one.all, default=Weights()),
        outside=outside,
        vocabulary=text.vocab_size,
        channels=text.hidden_size,
        pair_cost=pair_cost(attention_channels(config)),
        prefix_cost=prefix_cost(config),
        activation_bytes=rule() if per_token is None else per_token,
        exact=per_token is not None,
    )


def _kept_per_token(model: Any, *, tp: int, bfloat16: bool) -> float | None:
    """Bytes that a forward without data keeps per token; None if it does not run."""
    try:
        with _EvenExperts(tp):
            few, more = (kept_bytes(model, one, bfloat16=bfloat16) for one in _PROBED_TOKENS)
    except Exception:  # experts choose tokens by their values, which do not exist here
        return None
    return (more - few) / (_PROBED_TOKENS[1] - _PROBED_TOKENS[0])


def _outline(config: Any, lora: LoraSettings | None, *, frozen: bool) -> Any:
    """The model without data. PEFT cannot insert adapters among tensors that only pretend to be on
    a device, so it is built on none."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        if lora is not None:
            inject(model, lora, Path())
    return model.requires_grad_(False) if frozen else model


def _allocate_nothing(model: nn.Module) -> None:
    """Give the tensors of an outline a device, within a mode whose tensors take no memory."""
    made: dict[int, Tensor] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, one in tensors.items():
                if one is None:
                    continue
                if id(one) not in made:
                    empty = torch.empty(one.shape, dtype=one.dtype, device="cpu")
                    own = isinstance(one, nn.Parameter)
                    made[id(one)] = nn.Parameter(empty, one.requires_grad) if own else empty
                tensors[name] = made[id(one)]  # type: ignore[assignment]


@contextmanager
def _mesh_of(parts: int) -> Iterator[DeviceMesh | None]:
    """A mesh of that many ranks that exists in this process alone, and exchanges nothing; None for
    one."""
    if parts == 1:
        yield None
        return
    # Registers the backend; torch has no other module that does.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=parts)
    try:
        yield init_device_mesh("cpu", (parts,))
    finally:
        dist.destroy_process_group()


class _EvenExperts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode in which each part has an equal share of the pairs of a token and an expert: which
    entries of a mask are set is unknown where tensors have no data."""

    def __init__(self, parts: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._parts = parts

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.nonzero.default and self._parts > 1:
            count = args[0].numel() // self._parts
            return args[0].new_empty((count, args[0].ndim), dtype=torch.long)
        return func(*args, **(kwargs or {}))


def kept_bytes(model: Any, tokens: int, *, bfloat16: bool) -> int:
    """Bytes that autograd keeps of a forward of the model's layers, without its parameters."""
    own = {local(one).untyped_storage()._cdata for one in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage.nbytes()
        held.append(tensor)  # an address must not be used twice
        return tensor

    held: list[Tensor] = []
    device = next(model.parameters()).device
    ids = torch.zeros((1, tokens), dtype=torch.long, device=device)
    autocast = numerics.autocast(device, torch.bfloat16 if bfloat16 else None)
    with autocast, torch.autograd.graph.saved_tensors_hooks(keep, lambda one: one):
        model.base_model(input_ids=ids, use_cache=False)
    # Matrices in the type of autocast are kept once, for any number of tokens.
    return sum(kept.values())


def estimate(size: ModelSize, run: MemorySettings) -> Estimate:
    """The memory of one rank; `size` is that of one of the run's parts."""
    assert all(one.parts == run.shape.tp for one in (size, *run.frozen))
    shards, held = run.shape.shards, _held(size, run.shape)
    tokens, computed = largest_range(
        run.context, run.shape.cp, pair_cost=size.pair_cost, prefix_cost=size.prefix_cost
    )
    narrow = 2.0 if run.bfloat16 else 4.0
    states = tokens * size.channels
    rows = table_rows(states, (size.vocabulary, size.channels))
    of_layers = size.activation_bytes * computed
    if run.recompute:
        # Kept layers, the inputs of the others, and one of these in its backward.
        kept = of_layers * (1 - run.recompute + 1 / size.layers)
        of_layers = min(of_layers, kept) + 4.0 * states * size.layers * run.recompute
    rounds = run.bfloat16 and not size.adapters
    return Estimate(
        weights=held.bytes,
        gradients=4.0 * held.trained,
        optimizer=MOMENTS[run.optimizer] * held.trained,
        gathered=_gathered(size, narrow) if shards > 1 else _copies(size, narrow),
        rounded=4.0 * size.outside.all / shards if rounds else 0.0,
        activations=of_layers,
        head=4.0 * (kept_elements(states) + 2 * rows * size.vocabulary + states),
        frozen=sum(_frozen_bytes(one, run.shape, narrow) for one in run.frozen),
    )


def _held(size: ModelSize, shape: MeshShape) -> Weights:
    """Weights that one rank holds: layers are sharded over the ranks of a part, the rest over all
    ranks of a copy."""
    return size.in_layers * (shape.tp / shape.shards) + size.outside * (1 / shape.shards)


def _gathered(size: ModelSize, narrow: float) -> float:
    """Bytes of a layer, the next one, its gradient, and the sum's buffer; the other unit stays
    gathered. With adapters layers are gathered in the types that a rank holds."""
    layer, outside = size.largest_layer, size.outside
    of_layers = layer.bytes if size.adapters else narrow * layer.all
    gradient = 4.0 if size.adapters else narrow
    return (
        2 * of_layers + layer.trained * (gradient + 4.0) + 4.0 * outside.all + 8.0 * outside.trained
    )


def _copies(size: ModelSize, narrow: float) -> float:
    """Bytes of the matrices in the type of autocast, kept for a pass."""
    return (size.in_layers.all - size.in_layers.narrow) * narrow if narrow < 4.0 else 0.0


def _frozen_bytes(size: ModelSize, shape: MeshShape, narrow: float) -> float:
    """A model without gradients: in its forward, a layer and the next one are gathered."""
    units = size.largest_layer.all * 2 * narrow + size.outside.bytes
    return _held(size, shape).bytes + (units if shape.shards > 1 else 0.0)


def fitting(size: ModelSize, run: MemorySettings, *, device_bytes: float) -> MemorySettings | None:
    """The settings nearest to `run` that fit into a device with as many ranks; None if none do.

    `mesh.tp` stays. Shards first, then recomputed activations, then more ranks per tree.
    """
    return next(
        (one for one in _alternatives(run) if estimate(size, one).total <= device_bytes), None
    )


def _alternatives(run: MemorySettings) -> Iterator[MemorySettings]:
    tp = run.shape.tp
    ranks = run.shape.ranks // tp
    yield run
    for cp in (one for one in range(1, ranks + 1) if ranks % one == 0):
        for recompute in (0.0, 1.0):
            data = ranks // cp
            if data > 1 or ranks == 1:
                shape = MeshShape(dp_shard=data, cp=cp, tp=tp)
                yield replace(run, shape=shape, recompute=recompute)


def _count(module: nn.Module, *, narrow: Sequence[Tensor]) -> Weights:
    """The weights that this part holds; `narrow` has the matrices that are kept in 16 bits if they
    are frozen."""
    matrices = {id(one) for one in narrow}
    own = [(local(one).numel(), one) for one in module.parameters()]
    frozen = [(count, one) for count, one in own if not one.requires_grad]
    return Weights(
        all=sum(count for count, _ in own),
        trained=sum(count for count, one in own if one.requires_grad),
        narrow=sum(count for count, one in frozen if id(one) in matrices),
    )


def _sum(several: Iterable[Weights]) -> Weights:
    return sum(several, start=Weights())


def _rule_of_thumb(config: Any, layers: int, *, bfloat16: bool, tp: int) -> float:
    """Elements kept of a dense layer per token: 6 of its channels, 4 of its inner ones and 8 of
    attention's; experts as many as a token is sent to. A part has a share of the latter two."""
    channels = config.hidden_size
    inner = getattr(config, "intermediate_size", None) or 4 * channels
    if experts := getattr(config, "num_experts_per_tok", 0):
        inner = experts * (getattr(config, "moe_intermediate_size", None) or inner)
    kept = 6 * channels + (8 * channels + 4 * inner) / tp
    per_token: float = layers * kept * (3.0 if bfloat16 else 4.0)
    return per_token
