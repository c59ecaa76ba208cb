"""Attention of a decode step over bfloat16 keys, by kernel.

    python -m benchmarks.decode_attention [--quick] [--json FILE]

One layer of the shape of SmolLM2 (3 heads of keys, 3 queries of each, 64 channels), one thread. CPU
milliseconds of a layer, the least of interleaved rounds: other programs
only add to it.

    <rows>x<keys>.bfloat16   torch's kernel, which rounds probabilities to bfloat16
    <rows>x<keys>.float32    keys and values copied to float32, torch's kernel
    <rows>x<keys>.float64    the same in float64: what a worker without a compiler computes
    <rows>x<keys>.compiled   float64, compiled on the host; absent without a C compiler
    <rows>x<keys>.compiled_over_<kernel>   medians of ratios within a round
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from unittest.mock import patch

import torch

from benchmarks.support.report import arguments, keep, show
from services.inference.engines.embedded.kv.attention import attention_bias, attention_with_lse
from services.inference.engines.embedded.kv.compiled_attention import (
    CompiledAttention,
    compiled_attention,
)

SHAPES = ((8, 320), (4, 2048), (4, 4096), (2, 8192))
HEADS, GROUPS, SIZE = 3, 3, 64


def kernels(rows: int, keys: int) -> dict[str, Callable[[], object]]:
    """One call of each."""
    q_RHGD = torch.randn(rows, HEADS, GROUPS, SIZE).bfloat16()
    k_RHTD, v_RHTD = torch.randn(2, rows, HEADS, keys, SIZE).bfloat16()
    last_R = torch.arange(keys - rows, keys)

    def of(kind: torch.dtype) -> Callable[[], object]:
        bias = attention_bias(last_R, keys, window=None, dtype=kind)[:, None, None]
        return lambda: attention_with_lse(q_RHGD.to(kind), k_RHTD, v_RHTD, bias=bias, scale=None)

    compiled = of(torch.float64)

    def widened() -> object:
        with patch.object(CompiledAttention, "takes", return_value=False):
            return compiled()

    found = {"bfloat16": of(torch.bfloat16), "float32": of(torch.float32), "float64": widened}
    return found if compiled_attention() is None else found | {"compiled": compiled}


def measure(rows: int, keys: int, *, rounds: int) -> dict[str, float]:
    """The keys of one shape."""
    calls = kernels(rows, keys)
    repeats = max(1, 20_000 // (rows * keys))
    spent: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, call in calls.items():
            began_s = time.process_time()
            for _ in range(repeats):
                call()
            if number:
                spent[name].append((time.process_time() - began_s) / repeats * 1000)
    key = f"{rows}x{keys}"
    found = {f"{key}.{name}": min(each) for name, each in spent.items()}
    if "compiled" in spent:
        own = spent.pop("compiled")
        for name, each in spent.items():
            ratios = [one / other for one, other in zip(own, each, strict=True)]
            found[f"{key}.compiled_over_{name}"] = median(ratios)
    return found


@torch.inference_mode()
def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__ or "", quick="the shortest keys alone")
    options = parser.parse_args()
    torch.set_num_threads(1)
    numbers: dict[str, float] = {}
    for rows, keys in SHAPES[:1] if options.quick else SHAPES:
        numbers |= measure(rows, keys, rounds=3 if options.quick else 15)
    show("decode attention, CPU ms a layer", numbers)
    keep(numbers, options.json)


if __name__ == "__main__":
    main()
