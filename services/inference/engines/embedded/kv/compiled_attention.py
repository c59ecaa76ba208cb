"""Attention of few queries in float64 over bfloat16 keys, compiled where the host has a C compiler.

torch must first copy keys and values to float64, and its kernels are slow for few queries. The
compiled code reads them as they are. Both add up in float64, so their results are rounded alike:
without a compiler a worker is slower, not different.

Owns the compilation, the check against torch and the call. The library is compiled at first use, in
a directory that is removed at once: nothing stale or foreign is ever loaded.

Shapes: A rows, B heads of keys, S queries of each, T keys, D head size.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import ClassVar

import torch

from forge.core.errors import first_line
from forge.runtime.telemetry import log

MOST_QUERIES = 48
"""With more of them torch's kernel is as fast."""
_SOURCE = Path(__file__).with_suffix(".c")
_COMPILERS = ("cc", "gcc", "clang")
_FLAGS = ("-O3", "-march=native", "-std=gnu11", "-shared", "-fPIC")
_COMPILE_TIMEOUT_S = 60.0
_ELEMENTS_OF_THREAD = 1 << 19
"""Keys times head size that are worth a thread."""
_TOLERANCE = 1e-12


class _Call(ctypes.Structure):
    """`Call` of the C code."""

    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "bias", "out", "lse")),
        *(
            (name, ctypes.c_int64)
            for name in (
                *("rows", "heads", "queries", "keys", "size"),
                *("k_row", "k_head", "k_key", "v_row", "v_head", "v_key"),
                *("bias_row", "bias_query"),
            )
        ),
    ]


_Function = Callable[[object, int], int]


class CompiledAttention:
    """The compiled function."""

    def __init__(self, function: _Function) -> None:
        self._function = function

    @staticmethod
    def takes(q_ABSD: torch.Tensor, k_ABTD: torch.Tensor, v_ABTD: torch.Tensor) -> bool:
        """Whether the code computes this: few queries in float64 over bfloat16 on a CPU."""
        return (
            q_ABSD.dtype is torch.float64
            and k_ABTD.dtype is v_ABTD.dtype is torch.bfloat16
            and q_ABSD.device.type == "cpu"
            and q_ABSD.shape[2] <= MOST_QUERIES
            and q_ABSD.shape[3] % 8 == 0
            and q_ABSD.shape[3] <= 512
            and k_ABTD.stride(3) == v_ABTD.stride(3) == 1
        )

    def __call__(
        self,
        q_ABSD: torch.Tensor,
        k_ABTD: torch.Tensor,
        v_ABTD: torch.Tensor,
        *,
        bias: torch.Tensor | None,
        scale: float | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention and the log-sum-exp of its scores, [A, B, S]; float64. `bias`: [A or 1, 1,
        S or 1, T], added to the scores."""
        rows, heads, queries, size = q_ABSD.shape
        scaled_ABSD = (q_ABSD * (size**-0.5 if scale is None else scale)).contiguous()
        out_ABSD = torch.empty_like(scaled_ABSD)
        lse_ABS = scaled_ABSD.new_empty((rows, heads, queries))
        bias_ST, strides = None, (0, 0)
        if bias is not None:
            bias_ST = bias if bias.stride(3) == 1 else bias.contiguous()
            strides = (_stride(bias_ST, 0), _stride(bias_ST, 2))
        call = _Call(
            *(one.data_ptr() for one in (scaled_ABSD, k_ABTD, v_ABTD)),
            None if bias_ST is None else bias_ST.data_ptr(),
            *(out_ABSD.data_ptr(), lse_ABS.data_ptr()),
            *(rows, heads, queries, k_ABTD.shape[2], size),
            *(*k_ABTD.stride()[:3], *v_ABTD.stride()[:3], *strides),
        )
        worth = k_ABTD.numel() // _ELEMENTS_OF_THREAD
        threads = max(1, min(torch.get_num_threads(), worth))
        if self._function(ctypes.byref(call), threads):
            raise ValueError(f"heads of {size} channels")
        return out_ABSD, lse_ABS


def _stride(values: torch.Tensor, place: int) -> int:
    return values.stride(place) if values.shape[place] > 1 else 0


@cache
def compiled_attention() -> CompiledAttention | None:
    """The compiled code, once per process; None, with a line in the log, without a compiler and
    where it is wrong. The first call takes about a second."""
    try:
        found = CompiledAttention(_compiled(_compiler()))
        error = _error(found)
    except (OSError, subprocess.SubprocessError, AttributeError) as failure:
        log.info("compiled_attention_not_used", reason=first_line(failure))
        return None
    if not error <= _TOLERANCE:
        log.warning("compiled_attention_not_used", reason=f"its outputs differ by {error:.3g}")
        return None
    return found


def _compiler() -> Sequence[str]:
    chosen = os.environ.get("CC")
    if chosen:
        return chosen.split()
    for name in _COMPILERS:
        if path := shutil.which(name):
            return [path]
    raise FileNotFoundError(f"there is no C compiler: none of {', '.join(_COMPILERS)} is in PATH")


def _compiled(compiler: Sequence[str]) -> _Function:
    with TemporaryDirectory(prefix="forge-attention-") as folder:
        library = Path(folder) / "attention.so"
        command = [*compiler, *_FLAGS, str(_SOURCE), "-o", str(library), "-lm", "-lpthread"]
        subprocess.run(command, check=True, capture_output=True, timeout=_COMPILE_TIMEOUT_S)
        function = ctypes.CDLL(str(library)).forge_attend
    function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_int64], ctypes.c_int
    found: _Function = function
    return found


@torch.no_grad()
def _error(found: CompiledAttention) -> float:
    """The largest difference to torch's products in float64, relative to values of about 1."""
    random = torch.Generator().manual_seed(0)
    kept = torch.randn((2, 2, 2, 531, 64), generator=random).bfloat16()
    q_ABSD = torch.randn((2, 2, 7, 64), generator=random).double()
    k_ABTD, v_ABTD = kept[:, :, 0, 3:], kept[:, :, 1, 3:]
    bias = torch.zeros((2, 1, 7, 528), dtype=torch.float64)
    bias[1, 0, 2, :270] = bias[0, 0, :, 301:] = -torch.inf
    out_ABSD, lse_ABS = found(q_ABSD, k_ABTD, v_ABTD, bias=bias, scale=0.2)
    scores_ABST = q_ABSD @ k_ABTD.double().transpose(-1, -2) * 0.2 + bias
    right_ABSD = scores_ABST.softmax(-1) @ v_ABTD.double()
    errors = (out_ABSD - right_ABSD, lse_ABS - scores_ABST.logsumexp(-1))
    return max(float(one.abs().max()) for one in errors)
