"""One set of casts for trainer and engine where they compute in 16 bits.

Both run a model under `torch.autocast`: matrix products, those of experts too, in 16 bits; the
residual stream, embeddings, norms, rotary embeddings, routers and the language-model head in
float32. Queries, keys and values are rounded to 16 bits. So the two differ by the order of sums
alone. The trainer keeps the parameters that it trains in float32 and rounds matrices as it
computes; the engine keeps only the rounded matrices (`store_narrow`), and the trainer those of
frozen models (`store_frozen_narrow`).

One different rounding of one value to 16 bits grows, over the layers, to the noise of independent
roundings. On a CPU no rounding differs: oneDNN adds up the products of a row in the same order for
any number of rows but one, and attention, whose sums have another order in each kernel call, adds
up in float64 (`attention_type`), where the order changes nothing that the rounding keeps. So do the
scans and convolutions of recurrent layers (`forge.rl.scans`).

Owns which parameters are matrices, and the patches of modules that autocast does not know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from forge.rl import scans

_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_ROUTERS = ("gate", "router")
"""Names of routers that are linear layers."""


def is_narrow(dtype: torch.dtype) -> bool:
    """Whether a type has 16 bits: only then the casts matter."""
    return dtype in (torch.bfloat16, torch.float16)


def autocast(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """Context of a forward pass; without effect for None and for types of 32 bits or more."""
    enabled = dtype is not None and is_narrow(dtype)
    return torch.autocast(device.type, dtype=dtype if enabled else None, enabled=enabled)


def matrix_type(value: Tensor) -> torch.dtype:
    """Type in which matrix products with `value` are computed here."""
    device = value.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else value.dtype


def attention_type(values: Tensor) -> torch.dtype:
    """Type in which attention over these values adds up; the result is rounded to theirs."""
    if not is_narrow(values.dtype):
        return values.dtype
    return torch.float64 if values.device.type == "cpu" else torch.float32


@contextmanager
def without_tf32() -> Iterator[None]:
    """Context in which products and convolutions in float32 keep all bits of their inputs on a GPU,
    also in a process that allows TF32 (as `TORCH_ALLOW_TF32_CUBLAS_OVERRIDE` does, which NVIDIA's
    containers set)."""
    precision, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
        torch.backends.cudnn.allow_tf32 = convolutions


class _OwnAttention(TorchFunctionMode):
    """Computes torch's attention in float64 on a CPU, on values rounded to 16 bits."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = dict(kwargs or {})
        if func is not scaled_dot_product_attention:
            return func(*args, **named)
        names = ("query", "key", "value", "attn_mask")
        named = dict(zip(names, args, strict=False)) | named
        value: Tensor = named["value"]
        narrow = matrix_type(value)
        if value.device.type != "cpu" or not is_narrow(narrow):
            return func(**named)
        for name in names:
            one = named.get(name)
            if isinstance(one, Tensor) and one.is_floating_point():
                named[name] = (one if name == "attn_mask" else one.to(narrow)).double()
        with torch.autocast(value.device.type, enabled=False):
            return func(**named).to(narrow)


_own_attention: ContextVar[bool] = ContextVar("own_attention", default=False)


@contextmanager
def own_attention(*, used: bool = True) -> Iterator[None]:
    """Context of a pass with a model's own attention, if it is `used`: where it is torch's, it
    rounds on a CPU as that of trees and of the engine does."""
    token = _own_attention.set(used)
    try:
        with _OwnAttention() if used else nullcontext():
            yield
    finally:
        _own_attention.reset(token)


def uses_own_attention() -> bool:
    """Whether this is within `own_attention`."""
    return _own_attention.get()


_wide_module: ContextVar[nn.Module | None] = ContextVar("wide_module", default=None)


@contextmanager
def wide_vectors(module: nn.Module | None) -> Iterator[None]:
    """Context of a pass under autocast, in which a module's parameters in 16 bits are float32 where
    autocast does not round them: those of norms, scans and convolutions. None: no effect."""
    with ExitStack() as stack:
        for inner, name, one in list(narrow_parameters(module)) if module is not None else ():
            if name not in matrices_of(inner):
                stack.enter_context(with_parameters(inner, {name: one.float()}))
        token = _wide_module.set(module)
        try:
            yield
        finally:
            _wide_module.reset(token)


def widened_module() -> nn.Module | None:
    """The module of `wide_vectors` that this is within; None outside."""
    return _wide_module.get()


def narrow_parameters(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """The parameters in 16 bits, each with its module and its name there."""
    for inner in module.modules():
        for name, one in inner._parameters.items():
            if one is not None and is_narrow(one.dtype):
                yield inner, name, one


def patch(model: nn.Module) -> None:
    """Make head and routers compute in float32, and experts in the type of autocast. Idempotent."""
    for module in wide_modules(model):
        module.forward = partial(_in_float32, module)
    for module in model.modules():
        if not isinstance(module, nn.Linear) and matrices_of(module):
            module.forward = partial(_in_matrix_type, module)
    scans.patch(model)


def store_narrow(model: nn.Module, dtype: torch.dtype) -> None:
    """Keep matrices in `dtype`, all other floating-point parameters and buffers in float32."""
    narrow = {id(one) for one in matrices(model)}
    for one in model.parameters():
        if one.is_floating_point():
            one.data = one.data.to(dtype if id(one) in narrow else torch.float32)
    for buffer in model.buffers():
        buffer.data = _widened(buffer.data)


def store_frozen_narrow(
    model: nn.Module, dtype: torch.dtype, *, lossless: Callable[[nn.Parameter], bool] | None
) -> None:
    """Keep frozen matrices in `dtype` where this changes no value, as for those of a model
    directory of that type: passes in it compute the same with half the memory. `lossless` decides
    for matrices without values yet."""
    for one in (each for each in matrices(model) if not each.requires_grad):
        narrow = one.data.to(dtype)
        if lossless(one) if lossless else torch.equal(narrow.to(one.dtype), one):
            one.data = narrow


def matrices(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that autocast, or `patch`, rounds for a product."""
    wide = {id(one) for module in wide_modules(model) for one in module.parameters()}
    found: dict[int, nn.Parameter] = {}
    for module in model.modules():
        found.update((id(one), one) for one in matrices_of(module).values())
    return [one for identity, one in found.items() if identity not in wide]


def wide_modules(model: nn.Module) -> list[nn.Module]:
    """The head and the routers, which compute in float32."""
    config = model.config.get_text_config(decoder=True)  # type: ignore[union-attr, operator]
    counts = {getattr(config, name, None) for name in _EXPERT_COUNTS} - {None}
    head = model.get_output_embeddings()  # type: ignore[operator]
    found = [] if head is None else [head]
    for name, module in model.named_modules():
        leaf = name.rpartition(".")[2]
        is_gate = isinstance(module, nn.Linear) and leaf in _ROUTERS
        if "Router" in type(module).__name__ or (is_gate and module.out_features in counts):
            found.append(module)
    return found


def matrices_of(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of a linear layer, its bias too, or of several experts in one tensor
    [experts, out, in]."""
    linear = isinstance(module, nn.Linear)
    if not linear and "Expert" not in type(module).__name__:
        return {}
    own = module.named_parameters(recurse=False)
    return {name: one for name, one in own if one.is_floating_point() and (linear or one.ndim == 3)}


def _in_float32(module: nn.Module, *given: Any, **named: Any) -> Any:
    device = next(module.parameters()).device
    with torch.autocast(device.type, enabled=False):
        named = {name: _widened(one) for name, one in named.items()}
        return type(module).forward(module, *map(_widened, given), **named)


def _widened(value: Any) -> Any:
    narrow = isinstance(value, Tensor) and is_narrow(value.dtype)
    return value.float() if narrow else value


def _in_matrix_type(module: nn.Module, *given: Any, **named: Any) -> Any:
    rounded = {
        name: one.to(kind)
        for name, one in matrices_of(module).items()
        if one.dtype != (kind := matrix_type(one))
    }
    with with_parameters(module, rounded):
        return type(module).forward(module, *given, **named)


@contextmanager
def with_parameters(module: nn.Module, values: Mapping[str, Tensor | None]) -> Iterator[None]:
    """Context in which some parameters of a module have other values."""
    kept = {name: module._parameters[name] for name in values}
    module._parameters.update(values)  # type: ignore[arg-type]
    try:
        yield
    finally:
        module._parameters.update(kept)


@contextmanager
def with_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Context in which a module has another forward."""
    kept = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if kept is not None:
            module.forward = kept
