"""The layers of a model, divided over ranks that compute every token together (tensor parallelism).

Owns reading transformers' plan for a model, and dividing parameters and products by it. The plan is
data: names of modules with a style each. There is no code for single models.

    colwise                          output columns; attention computes this rank's heads
    rowwise                          input columns; outputs are summed over ranks
    colwise_gather_output            output columns, gathered
    rowwise_split_input              input columns of a whole input
    replicated_with_grad_allreduce   whole; it sees this rank's heads alone
    mla_kv_a_proj                    whole; its last columns go to this rank's heads
    grouped_gemm (expert plan)       experts; each rank computes the tokens of its own

Adapters (LoRA) of a divided product are divided with it: the factor that has its columns, or its
rows. The other factor is whole, and its gradient is summed over ranks.

Experts without a plan, or whose number the ranks do not divide, stay whole, and every rank computes
them. Embedding, last norm and head are not divided here: `forge.rl.parallel.sharding` shards them
over all ranks, and `forge.rl.model.policy` divides the logit rows.

Shapes: T tokens, K experts per token, P pairs of a token and an expert of this rank, C channels.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from forge.core.errors import InvalidArgument
from forge.rl.numerics import with_parameters
from forge.rl.parallel.tensor_exchange import (
    entered,
    joined,
    own_columns,
    own_gradient,
    summed,
)

Forward = Callable[..., Tensor]
COLUMNS = ("colwise", "colwise_gather_output", "colwise_rep")
WHOLE = ("replicated_with_grad_allreduce", "mla_kv_a_proj")
EXPERTS = "grouped_gemm"
_HEADS = ("q_proj", "k_proj", "v_proj")
"""Projections whose columns are heads."""
_COLUMNS = {"weight": 0, "bias": 0}
_ROWS = {"weight": 1}
"""The dimension in which the parameters of a product are divided."""


class Division:
    """Parts of one model that the ranks of a group divide."""

    def __init__(self, model: Any, layers: Mapping[str, nn.Module], ranks: int) -> None:
        """`layers` are those of the model by name. Raises `InvalidArgument`, in one line, for a
        model that `ranks` ranks cannot divide."""
        self._model, self._ranks = model, ranks
        self._modules = {
            f"{name}.{inner}" if inner else name: module
            for name, layer in layers.items()
            for inner, module in layer.named_modules()
        }
        self.whole_experts = ""
        """Reason why experts stay whole on every rank; "" if they do not."""
        self._experts = self._divisible_experts()
        self._rules = self._products()
        self._check()

    def apply(self, mesh: DeviceMesh) -> None:
        """Divide the parameters over the ranks of a mesh of one dimension, in place, and let the
        modules exchange what they need. No communication; parameters may be without memory."""
        group = mesh.get_group()
        entries: dict[str, _Entry] = defaultdict(_Entry)
        config = self._model.config.get_text_config(decoder=True)
        last = getattr(config, "qk_rope_head_dim", 0)
        for name, style in self._rules.items():
            module = self._modules[name]
            product, downs, ups = _product(module), _factors(module, "A"), _factors(module, "B")
            divided, shared = (ups, downs) if style in COLUMNS else (downs, ups)
            if style not in WHOLE:
                for each in (product, *divided):
                    _divide(each, _COLUMNS if style in COLUMNS else _ROWS, mesh)
            site = _Site(
                module=module,
                product=product,
                divided=[product, *divided],
                shared=shared,
                forward=module.forward,
                group=group,
                entry=entries[name.rpartition(".")[0]],
                last=last,
            )
            module.forward = partial(_FORWARDS[style], site)
        for name, parameters in self._experts.items():
            module = self._modules[name]
            _divide(module, dict.fromkeys(parameters, 0), mesh)
            own = module.num_experts = int(cast(int, module.num_experts)) // self._ranks
            module.forward = partial(_own_experts, module, module.forward, group, own)
        embedding = self._model.get_input_embeddings()
        embedding.forward = partial(_own_tokens, embedding.forward, group)

    def _divisible_experts(self) -> dict[str, list[str]]:
        """Names of the expert parameters to divide, by module; none if one module is not divisible:
        all layers compute alike."""
        plan = getattr(self._model, "_ep_plan", None) or {}
        found: dict[str, list[str]] = {}
        for name, module in self._modules.items():
            own = [one for one, _ in module.named_parameters(recurse=False)]
            planned = [one for one in own if plan.get(_general(f"{name}.{one}")) == EXPERTS]
            count = getattr(module, "num_experts", 0)
            if planned and (planned != own or count != len(getattr(module, own[0]))):
                self.whole_experts = f"{name} is not of the kind that its expert plan divides"
            elif planned and count % self._ranks:
                self.whole_experts = f"{count} experts are not a multiple of it"
            elif planned:
                found[name] = planned
            elif any(one.ndim == 3 for one in module.parameters(recurse=False)):
                self.whole_experts = f"transformers has no expert plan for {_general(name)}"
        return {} if self.whole_experts else found

    def _products(self) -> dict[str, str]:
        """The style of each other module in a layer that transformers' plan divides."""
        plan = dict(self._model.tp_plan or {})
        whole = [name for name, style in plan.items() if style == "moe_tp_experts"]
        plan = {
            name: style
            for name, style in plan.items()
            if not any(name == one or name.startswith(f"{one}.") for one in whole)
        }
        for name, module in self._modules.items():
            for one, _ in module.named_parameters(recurse=False):
                if (style := plan.get(_general(f"{name}.{one}"))) is not None:
                    self._refuse(f"transformers' plan divides {name}.{one} alone ({style})")
        rules = {name: plan.get(_general(name)) for name in self._modules}
        return {name: style for name, style in rules.items() if style is not None}

    def _check(self) -> None:
        if not self._rules and not self._experts:
            self._refuse("transformers has no tensor-parallel plan for its layers")
        config = self._model.config.get_text_config(decoder=True)
        if any(name.rpartition(".")[2] in _HEADS for name in self._rules):
            for field in ("num_attention_heads", "num_key_value_heads"):
                heads = getattr(config, field, None) or 0
                if heads % self._ranks:
                    self._refuse(f"{field} = {heads} is not a multiple of it; {self._fewer(heads)}")
        for name, style in self._rules.items():
            if style not in _FORWARDS:
                self._refuse(f"its plan has {style} for {name}, which is not built")
            if style in WHOLE:
                continue
            module = _product(self._modules[name])
            if type(module) is not nn.Linear:
                self._refuse(f"{name} is a {type(module).__name__}, not a plain linear layer")
            field = "out_features" if style in COLUMNS else "in_features"
            if getattr(module, field) % self._ranks:
                count = getattr(module, field)
                self._refuse(
                    f"{field} = {count} of {name} is not a multiple of it; {self._fewer(count)}"
                )
        self._check_outside()

    def _check_outside(self) -> None:
        """Embedding, last norm and head: their gradients are summed over the ranks."""
        inside = {id(one) for module in self._modules.values() for one in module.parameters()}
        known = [self._model.get_input_embeddings(), self._model.get_output_embeddings()]
        known += [one for one in self._model.base_model.children() if "Norm" in type(one).__name__]
        inside |= {id(one) for module in known if module is not None for one in module.parameters()}
        for name, one in self._model.named_parameters():
            if id(one) not in inside:
                self._refuse(f"{name} is outside of its layers, embedding, last norm and head")

    def _fewer(self, count: int) -> str:
        """What to set where `count` is not divisible."""
        parts = math.gcd(count, self._ranks)
        return f"use mesh.tp = {parts}" if parts > 1 else "use mesh.dp_shard and mesh.cp"

    def _refuse(self, because: str) -> None:
        family = type(self._model).__name__
        raise InvalidArgument(f"mesh.tp = {self._ranks} is not allowed for {family}: {because}")


def _general(name: str) -> str:
    """The name with `*` for numbers of layers, as plans have it."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _product(module: nn.Module) -> nn.Module:
    """The linear layer itself, where PEFT has put adapters around it."""
    return cast(nn.Module, getattr(module, "base_layer", module))


def _factors(module: nn.Module, kind: str) -> list[nn.Module]:
    """Factors of the adapters of a module: A reads its input, B gives its output."""
    return [*getattr(module, f"lora_{kind}", nn.ModuleDict()).values()]


def _divide(module: nn.Module, dims: Mapping[str, int], mesh: DeviceMesh) -> None:
    for name, dim in dims.items():
        whole = module._parameters.get(name)
        if whole is not None:
            divided = distribute_tensor(whole.detach(), mesh, [Shard(dim)], src_data_rank=None)
            setattr(module, name, nn.Parameter(divided, requires_grad=whole.requires_grad))


@contextmanager
def _own_parameters(module: nn.Module) -> Iterator[None]:
    """Context in which divided parameters are this rank's parts, with gradient."""
    divided = {name: one for name, one in module._parameters.items() if one is not None}
    own = {name: one.to_local() for name, one in divided.items() if isinstance(one, DTensor)}
    with with_parameters(module, own):
        yield


@contextmanager
def _entered_parameters(module: nn.Module, group: dist.ProcessGroup) -> Iterator[None]:
    """Context in which whole parameters compute own values: their gradients are summed."""
    parameters = module._parameters.items()
    own = {name: entered(one, group) for name, one in parameters if one is not None}
    with with_parameters(module, own):
        yield


class _Entry:
    """The entry of a value that several products of a module read one after the other, such as
    queries, keys and values: its gradient is summed over ranks once."""

    def __init__(self) -> None:
        self._whole: Tensor | None = None
        self._entered: Tensor | None = None

    def __call__(self, whole: Tensor, group: dist.ProcessGroup) -> Tensor:
        if self._entered is None or self._whole is not whole:
            self._whole, self._entered = whole, entered(whole, group)
        return self._entered

    def clear(self) -> None:
        """Free the value."""
        self._whole = self._entered = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Site:
    """One module of the plan."""

    module: nn.Module
    product: nn.Module
    """The module, or the linear layer inside of its adapters."""
    divided: list[nn.Module]
    """The product and the factors of adapters that are divided with it."""
    shared: list[nn.Module]
    """The other factors."""
    forward: Forward
    """The module's own."""
    group: dist.ProcessGroup
    entry: _Entry
    """That of its parent."""
    last: int
    """Number of the module's last output columns that go to single heads."""


@contextmanager
def _parts(site: _Site) -> Iterator[None]:
    """Context in which the product computes with this rank's parts."""
    with ExitStack() as stack:
        for one in site.divided:
            stack.enter_context(_own_parameters(one))
        for one in site.shared:
            stack.enter_context(_entered_parameters(one, site.group))
        yield


def _columns(site: _Site, states: Tensor) -> Tensor:
    with _parts(site):
        return site.forward(site.entry(states, site.group))


def _joined_columns(site: _Site, states: Tensor) -> Tensor:
    return joined(_columns(site, states), site.group)


def _rows(site: _Site, states: Tensor) -> Tensor:
    site.entry.clear()
    bias = site.product._parameters.get("bias")
    with _parts(site), with_parameters(site.product, {"bias": None}):
        total = summed(site.forward(states), site.group)
    return total if bias is None else total + bias.to(total.dtype)


def _split_rows(site: _Site, states: Tensor) -> Tensor:
    return _rows(site, own_columns(states, site.group))


def _heads_alone(site: _Site, states: Tensor) -> Tensor:
    with _entered_parameters(site.module, site.group):
        return site.forward(states)


def _last_to_heads(site: _Site, states: Tensor) -> Tensor:
    out = site.forward(states)
    rest, last = torch.split(out, [out.shape[-1] - site.last, site.last], dim=-1)
    return torch.cat([rest, entered(last, site.group)], dim=-1)


_FORWARDS: Mapping[str, Callable[..., Tensor]] = {
    "colwise": _columns,
    "colwise_gather_output": _joined_columns,
    "colwise_rep": _joined_columns,
    "rowwise": _rows,
    "rowwise_rep": _split_rows,
    "rowwise_split_input": _split_rows,
    "replicated_with_grad_allreduce": _heads_alone,
    "mla_kv_a_proj": _last_to_heads,
}


def _own_tokens(forward: Forward, group: dist.ProcessGroup, ids: Tensor) -> Tensor:
    """The embedding of all tokens; each rank has the gradient of its share of them."""
    return own_gradient(forward(ids), group)


def _own_experts(
    module: nn.Module,
    forward: Forward,
    group: dist.ProcessGroup,
    own: int,
    states: Tensor,
    experts_TK: Tensor,
    weights_TK: Tensor,
) -> Tensor:
    """The weighted outputs of all experts. Each rank runs its `own` ones, that many, on the tokens
    that chose them."""
    if weights_TK.shape != experts_TK.shape:
        raise InvalidArgument(
            f"mesh.tp = {dist.get_world_size(group)} is not allowed: {type(module).__name__} needs "
            "routing weights of all experts on each rank"
        )
    states_TC = entered(states.reshape(-1, states.shape[-1]), group)
    weights_TK = entered(weights_TK, group)
    local_TK = experts_TK - dist.get_rank(group) * own
    tokens_P, slots_P = ((local_TK >= 0) & (local_TK < own)).nonzero(as_tuple=True)
    weights_P, local_P = weights_TK[tokens_P, slots_P], local_TK[tokens_P, slots_P]
    if not len(tokens_P):  # one pair without weight: the parameters need a gradient all the same
        tokens_P, weights_P = tokens_P.new_zeros(1), 0 * weights_TK.reshape(-1)[:1]
        local_P = tokens_P
    with _own_parameters(module):
        out_PC = forward(states_TC[tokens_P], local_P[:, None], weights_P[:, None])
    total_TC = torch.zeros_like(states_TC).index_add(0, tokens_P, out_PC.to(states_TC.dtype))
    return summed(total_TC, group).view(states.shape)
