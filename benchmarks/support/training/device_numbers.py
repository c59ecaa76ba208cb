"""Numbers of a GPU for a training benchmark: rates, model FLOP utilization, memory, a profile."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from benchmarks.support.training.ways import Bench
from forge.core.prefix_tree import Sample
from forge.rl.config import MeshShape
from services.trainer.memory_plan import MemorySettings, estimate, size_of

PEAK_FLOPS = 989e12
"""Dense bf16 of an H100 SXM, by its datasheet: the denominator of every MFU."""
GB = 1e9


def device_clock() -> float:
    """The wall clock, once the device has done all work that it was given."""
    torch.cuda.synchronize()
    return time.perf_counter()


def peak_gb(run: Callable[[], object]) -> tuple[object, float]:
    """The result of `run`, and the most memory that was allocated in it, weights included."""
    torch.cuda.reset_peak_memory_stats()
    found = run()
    return found, torch.cuda.max_memory_allocated() / GB


def rates(
    time_s: Mapping[str, float], flops: Mapping[str, float], *, samples: int, tree: int
) -> dict[str, float]:
    """Tokens of samples per second by each way, of the tree per second, and MFU.

    `flops` are the operations that a way must do, without masked pairs and recomputation; ways that
    are not in it have no MFU.
    """
    found = {f"{way}_sample_tokens_per_s": samples / value for way, value in time_s.items()}
    found["tree_tokens_per_s"] = tree / time_s["tree"]
    for way, operations in flops.items():
        if way in time_s:
            found[f"{way}_mfu"] = operations / time_s[way] / PEAK_FLOPS
    return found


def step_numbers(bench: Bench, samples: Sequence[Sample], *, recompute: bool) -> dict[str, float]:
    """A whole optimizer step, with clipping, AdamW and statistics, after one to warm up; its peak
    of memory beside the trainer's estimate."""
    plan = bench.learner.plan(samples)
    bench.learner.step(plan, weight_version=1)
    began = device_clock()
    _, peak = peak_gb(lambda: bench.learner.step(plan, weight_version=1))
    found = {"step_s": device_clock() - began, "step_peak_gb": peak}
    size = size_of(bench.config, bfloat16=bench.is_narrow)
    run = MemorySettings(
        shape=MeshShape(),
        context=plan.tree_tokens,
        bfloat16=bench.is_narrow,
        recompute=float(recompute),
    )
    return found | {"step_estimated_gb": estimate(size, run).total / GB}


def profile(bench: Bench, samples: Sequence[Sample], file: Path) -> None:
    """Write the operations of one forward and backward, by time on the device and on the host."""
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as watched:
        began = device_clock()
        bench.tree(samples)
        took = device_clock() - began
    averages = watched.key_averages()
    tables = [
        averages.table(sort_by=key, row_limit=45, max_name_column_width=70)
        for key in ("self_device_time_total", "self_cpu_time_total")
    ]
    file.write_text("\n\n".join([f"{took * 1e3:.1f} ms under the profiler", *tables]))
