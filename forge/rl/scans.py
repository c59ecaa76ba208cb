"""Scans and convolutions of recurrent layers: in float64 where a CPU computes in 16 bits.

Engine and trainer divide the tokens of a recurrent layer differently: a pass or node in chunks, a
decode step from its state. transformers has functions for both, which add up in another order and
round to 16 bits at other places. In float64 they round alike. The result has the type of the input,
as that of a GPU's kernels has. States stay float64.

Owns which functions of a layer's Python module these are, and their replacement. On a GPU and in
types of 32 bits or more they compute as before: kernels of a GPU add up in float32 by themselves.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from inspect import signature, unwrap
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from forge.rl.begun_scan import from_state

Compute = Callable[[dict[str, Any]], Any]
"""One of the functions, over its arguments by name."""
Handler = Callable[[str, Compute, dict[str, Any]], Any]
"""Computes a call of a function in place of it; gets its name, itself and its arguments."""

CONVOLUTION = "causal_conv1d_fn"
LIGHTNING = "lightning_scan"
"""That of `forge.rl.model.lightning`."""
MAMBA1 = "mamba_selective_scan"
"""Takes the state to begin with, too, as `begun_scan.STATE`."""
_STATES: dict[str, str] = {
    CONVOLUTION: "",
    "causal_conv1d_update": "conv_state",
    "chunk_kimi_delta_attention": "",
    LIGHTNING: "",
    "mamba2_chunk_scan": "",
    "mamba2_selective_state_update": "state",
    MAMBA1: "",
    "mamba_selective_state_update": "state",
    "recurrent_kimi_delta_attention": "",
    "torch_chunk_gated_delta_rule": "",
    "torch_recurrent_gated_delta_rule": "",
}
"""Functions of transformers' modules, each with the argument that it changes in place."""
_WIDER = {"float": "double", "float32": "float64"}
"""Names of casts within these functions."""


class _Local(threading.local):
    handler: Handler | None = None
    state: Tensor | None = None
    """The last state that a scan returned in float64."""


_local = _Local()


def patch(model: nn.Module) -> None:
    """Replace these functions in the Python modules of a model's layers. Idempotent."""
    for source in {type(one).__module__ for one in model.modules()}:
        names = vars(sys.modules[source])
        for name in _STATES.keys() & names.keys():
            if not hasattr(names[name], "_forge_wide"):
                names[name] = _replaced(name, names[name])


def begins_with_states(layer: nn.Module) -> bool:
    """Whether a layer of Mamba 1 has the scan that `begun_scan` lets begin with a state."""
    return MAMBA1 in vars(sys.modules[type(layer).__module__])


@contextmanager
def handled(handler: Handler) -> Iterator[None]:
    """Context in which `handler` gets this thread's calls of replaced functions."""
    before, _local.handler, _local.state = _local.handler, handler, None
    try:
        yield
    finally:
        _local.handler, _local.state = before, None


def unrounded(state: Tensor) -> Tensor:
    """A state that a layer hands to its cache within `handled`, as its scan returned it: some
    layers round it to float32."""
    wide = _local.state
    return state if wide is None or wide.shape != state.shape else wide


def _replaced(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    reference = unwrap(plain)
    assert isinstance(reference, FunctionType)
    parameters = list(signature(reference).parameters)
    double: Callable[..., Any] = _in_double(reference)
    if name == MAMBA1:
        plain, double = from_state(plain), from_state(double)

    def compute(places: int, arguments: dict[str, Any]) -> Any:
        values = arguments[next(one for one in parameters if one != _STATES[name])]
        if values.device.type == "cpu" and torch.is_autocast_enabled("cpu"):
            return _computed_wide(double, _STATES[name], arguments, values.dtype)
        # By place as in the call: kernels of a GPU have other names.
        given = [arguments[one] for one in parameters[:places]]
        named = {key: one for key, one in arguments.items() if key not in parameters[:places]}
        return plain(*given, **named)

    @wraps(plain)
    def computed(*given: Any, **named: Any) -> Any:
        arguments = dict(zip(parameters, given, strict=False)) | named
        if _local.handler is None:
            return compute(len(given), arguments)
        return _local.handler(name, partial(compute, len(given)), arguments)

    computed._forge_wide = True  # type: ignore[attr-defined]
    return computed


def _computed_wide(
    double: Callable[..., Any], state: str, arguments: dict[str, Any], kind: torch.dtype
) -> Any:
    wide = {name: _widened(one) for name, one in arguments.items()}
    with torch.autocast("cpu", enabled=False):
        result = double(**wide)
    if state and wide[state] is not arguments[state]:
        arguments[state].copy_(wide[state])
    if not isinstance(result, tuple):
        return result.to(kind)
    _local.state = result[1]
    return (result[0].to(kind), *result[1:])


def _widened(value: Any) -> Any:
    floating = isinstance(value, Tensor) and value.is_floating_point()
    return value.double() if floating else value


def _in_double(function: FunctionType) -> FunctionType:
    """The same function, with its casts to float32 to float64."""
    double = FunctionType(
        _with_names(function.__code__),
        # `float` is a cast of tensors and Python's type: the type, too, has the new name.
        {**function.__globals__, "double": float},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    double.__kwdefaults__ = function.__kwdefaults__
    return double


def _with_names(code: CodeType) -> CodeType:
    """`_WIDER` applied to the names that code reads, in nested functions too."""
    return code.replace(
        co_names=tuple(_WIDER.get(name, name) for name in code.co_names),
        co_consts=tuple(
            _with_names(one) if isinstance(one, CodeType) else one for one in code.co_consts
        ),
    )
