"""Scans of recurrent layers in float64."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from types import FunctionType
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.support.inference.model_families import families
from forge.rl import scans
from forge.rl.model.small_config import small_config

_CONFIGS = {one.model_type: one.config for one in families()}
_FUSED = {"mamba_inner_fn", "mamba2_split_conv1d_scan_combined"}
"""Functions that exist only as kernels of a GPU."""
_T, _H, _P, _N = 21, 4, 8, 8


def _functions(family: str) -> Any:
    """The Python module of a family's layers, with its functions replaced."""
    model = AutoModelForCausalLM.from_config(small_config(_CONFIGS[family]()))
    scans.patch(model)
    return import_module(type(model).__module__)


def _mamba2(functions: Any) -> tuple[torch.Tensor, torch.Tensor]:
    values, step = torch.randn(1, _T, _H, _P).bfloat16(), torch.randn(1, _T, _H).bfloat16()
    keys, reads = (torch.randn(1, _T, 1, _N).bfloat16() for _ in range(2))
    decay, skip, bias = -torch.rand(_H), torch.randn(_H), torch.randn(_H)
    common: dict[str, Any] = {"z": None, "dt_softplus": True}
    whole = functions.mamba2_chunk_scan(
        values, step, decay, keys, reads, chunk_size=8, D=skip, dt_bias=bias, **common
    )
    state = torch.zeros(1, _H, _P, _N, dtype=torch.float64)
    wide = {"D": skip[:, None].expand(-1, _P), "dt_bias": bias[:, None].expand(-1, _P)}
    steps = [
        functions.mamba2_selective_state_update(
            state,
            values[:, at],
            step[:, at, :, None].expand(-1, -1, _P),
            decay[:, None, None].expand(-1, _P, _N),
            keys[:, at],
            reads[:, at],
            **wide,
            **common,
        )
        for at in range(_T)
    ]
    return whole, torch.stack(steps, dim=1)


def _delta(chunked: str, recurrent: str, functions: Any) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v = (torch.randn(1, _T, _H, _P).bfloat16() for _ in range(3))
    of_channels = "kimi" in chunked
    gate = -torch.rand(1, _T, _H, _P) if of_channels else -torch.rand(1, _T, _H)
    rate = torch.rand(1, _T, _H).bfloat16()
    options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    whole, _ = getattr(functions, chunked)(
        q, k, v, g=gate, beta=rate, initial_state=None, chunk_size=8, **options
    )
    state, steps = None, []
    for at in range(_T):
        one = slice(at, at + 1)
        step, state = getattr(functions, recurrent)(
            q[:, one],
            k[:, one],
            v[:, one],
            g=gate[:, one],
            beta=rate[:, one],
            initial_state=state,
            **options,
        )
        steps.append(step)
    return whole, torch.cat(steps, dim=1)


def _gated_delta(functions: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return _delta("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule", functions)


def _kimi_delta(functions: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return _delta("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention", functions)


def _convolution(functions: Any) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, weight = torch.randn(2, _H, _T).bfloat16(), torch.randn(_H, 4)
    whole = functions.causal_conv1d_fn(inputs, weight, None, "silu")
    state = torch.zeros(2, _H, 4, dtype=torch.bfloat16)
    steps = [
        functions.causal_conv1d_update(inputs[..., at : at + 1], state, weight, None, "silu")
        for at in range(_T)
    ]
    return whole, torch.cat(steps, dim=-1)


@pytest.mark.parametrize(
    ("family", "compute"),
    [
        ("mamba2", _mamba2),
        ("qwen3_next", _gated_delta),
        ("kimi_linear", _kimi_delta),
        ("mamba2", _convolution),
    ],
)
def test_steps_round_as_chunks_do(
    family: str, compute: Callable[[Any], tuple[torch.Tensor, torch.Tensor]]
) -> None:
    """In 16 bits on a CPU, the results of chunks and of single tokens are equal bit for bit."""
    torch.manual_seed(0)
    functions = _functions(family)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        whole, steps = compute(functions)
    assert whole.dtype == steps.dtype == torch.bfloat16
    assert torch.equal(whole, steps)


def test_wider_types_compute_as_before() -> None:
    """Without autocast a replaced function is transformers' own."""
    functions = _functions("mamba2")
    inputs, weight = torch.randn(2, _H, _T), torch.randn(_H, 4)
    own = functions.causal_conv1d_fn.__wrapped__
    replaced = functions.causal_conv1d_fn(inputs, weight, None, activation="silu")
    assert torch.equal(replaced, own(inputs, weight, None, activation="silu"))


@pytest.mark.parametrize(
    "family",
    [
        "bailing_hybrid",
        "bamba",
        "falcon_h1",
        "falcon_mamba",
        "granitemoehybrid",
        "jamba",
        "kimi_linear",
        "lfm2",
        "lfm2_moe",
        "lfm3",
        "mamba",
        "mamba2",
        "nemotron_h",
        "olmo_hybrid",
        "qwen3_5_moe_text",
        "qwen3_5_text",
        "qwen3_next",
        "zamba2",
    ],
)
def test_all_kernels_of_a_family_are_known(family: str) -> None:
    """No function with a kernel for a GPU keeps its own rounding."""
    functions = vars(_functions(family))
    kernels = {
        name
        for name, one in functions.items()
        if getattr(one, "__module__", "") == functions["__name__"]
        and isinstance(one, FunctionType)
        and hasattr(one, "__wrapped__")
    }
    replaced = {name for name, one in functions.items() if hasattr(one, "_forge_wide")}
    assert replaced
    assert kernels - replaced <= _FUSED
