"""Training cost of merged prefix trees: `python -m benchmarks.prefix_tree [--quick] [--json FILE]`.

One forward and backward of CISPO over the same samples, interleaved in one process:

    tree            merged
    per_request     one sample at a time through the model's stock attention
    padded          batches padded to their longest sample, likewise
    varlen          samples packed into one sequence, each attending itself alone
    trajectories    each trajectory merged by itself, as trainers of whole trajectories have it
    prefix_grouper  the peer of that name, where one prompt has answers and nothing else
    trl             forward and backward of TRL's GRPOTrainer, in padded batches of requests

`flop_bound` is the ratio of operations, per request over tree: what merging could gain at equal
speed per operation, and `efficiency` how much of that was gained. Per-request *is* how a trainer
without merging sees multi-turn agents: one sample per LLM call.

With one thread, times are CPU seconds, which a shared machine disturbs less than the wall clock.
On a GPU (`--device cuda --bf16 --shape 1.7b`) they are the wall clock's, workloads are longer, and
there are tokens per second, MFU and peak memory besides.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from benchmarks.support.report import arguments, keep
from benchmarks.support.training.device_numbers import (
    device_clock,
    peak_gb,
    profile,
    rates,
    step_numbers,
)
from benchmarks.support.training.tree_workloads import Workload, device_workloads, make_workloads
from benchmarks.support.training.trl_peer import HAS_TRL
from benchmarks.support.training.ways import (
    SHAPES,
    UNSPLIT,
    Bench,
    has_prefix_grouper,
    packs_of,
)
from forge.core.prefix_tree import Sample
from forge.rl.learner.batch_plan import BatchPlan
from forge.rl.model.compiled import compile_layers
from forge.rl.model.recomputation import recompute_activations

LONG = {"g8": ("padded", "varlen", "trl"), "forty": ("padded", "varlen", "trajectories", "trl")}
"""Left out at full size, where they would take hours."""
WAYS = ("per_request", "padded", "varlen", "trajectories", "prefix_grouper", "trl")


def measure(
    bench: Bench,
    workload: Workload,
    *,
    rounds: int,
    clock: Callable[[], float],
    without: Sequence[str],
) -> dict[str, float]:
    """The keys of one workload, medians over rounds."""
    samples = workload.samples
    loss, plan = bench.tree(samples)
    merged = bench.gradients()
    ways = ways_of(bench, workload, pass_budget(samples, plan))
    for way in without:
        ways.pop(way, None)
    time_s, outcomes, peaks = timed(bench, ways, samples, rounds=rounds, clock=clock)
    planning_s = time_s.pop("plan")
    expected = float(outcomes.get("per_request", 0.0))  # type: ignore[arg-type]
    if "per_request" not in ways:
        expected = bench.per_request(samples)
    reference = bench.gradients()
    merged_bytes, packed_bytes = step_bytes_per_token(bench, samples, plan)
    apart, merged_flops = operations_of(bench, samples, plan)
    bound = apart / merged_flops
    found = {
        "tree_tokens": plan.tree_tokens,
        "sample_tokens": plan.sample_tokens,
        "plan_share": planning_s / time_s["tree"],
        "tree_bytes_per_token": merged_bytes,
        "varlen_bytes_per_token": packed_bytes,
        "flop_bound": bound,
        "loss_err": abs(loss - expected) / abs(expected),
        "grad_err": float((merged - reference).norm() / reference.norm()),
        **peaks,
    }
    if peaks:
        flops = {"tree": merged_flops, "per_request": apart}
        found |= rates(time_s, flops, samples=plan.sample_tokens, tree=plan.tree_tokens)
    for way, value in time_s.items():
        found[f"{way}_s"] = value
        if way != "tree":
            found[f"speedup_vs_{way}"] = value / time_s["tree"]
    if "per_request" in time_s:
        found["efficiency"] = found["speedup_vs_per_request"] / bound
    return found


def ways_of(bench: Bench, workload: Workload, budget: int) -> dict[str, Callable[[], object]]:
    """Every way to train on the workload; the last one's gradient stays."""
    samples = workload.samples
    ways: dict[str, Callable[[], object]] = {
        "tree": lambda: bench.tree(samples),
        "padded": lambda: bench.padded(samples, budget),
        "varlen": lambda: bench.varlen(samples, budget),
        "trajectories": lambda: bench.trajectories(workload.rollouts),
    }
    if workload.name == "trajectory" and bench.device.type == "cpu" and has_prefix_grouper():
        ways["prefix_grouper"] = lambda: bench.prefix_grouper(samples)
    if HAS_TRL:
        ways["trl"] = lambda: bench.trl(samples, budget)
    ways["per_request"] = lambda: bench.per_request(samples)
    return ways


def timed(
    bench: Bench,
    ways: Mapping[str, Callable[[], object]],
    samples: Sequence[Sample],
    *,
    rounds: int,
    clock: Callable[[], float],
) -> tuple[dict[str, float], dict[str, object], dict[str, float]]:
    """Median seconds of each way and of planning, interleaved; the last results; and on a GPU the
    peaks of memory."""
    seconds: dict[str, list[float]] = {way: [] for way in (*ways, "plan")}
    outcomes: dict[str, object] = {}
    peaks: dict[str, float] = {}
    for _ in range(rounds):
        for way, run in ways.items():
            began = clock()
            if bench.device.type == "cuda":
                outcomes[way], peaks[f"{way}_peak_gb"] = peak_gb(run)
            else:
                outcomes[way] = run()
            seconds[way].append(clock() - began)
        began = clock()
        bench.learner.plan(samples)
        seconds["plan"].append(clock() - began)
    return {way: statistics.median(found) for way, found in seconds.items()}, outcomes, peaks


def step_bytes_per_token(
    bench: Bench, samples: Sequence[Sample], plan: BatchPlan
) -> tuple[float, float]:
    """Peaks of a step over the tokens of its pass: merged in one, and packed without merging."""
    # As many tokens as the tree, about: the weights' gradients are shared by as many.
    packs = packs_of(samples, pass_budget(samples, plan), padded=False)
    pack = max(packs, key=tokens_of)
    others = plan.trained_tokens - sum(one.trained_tokens for one in pack)
    packed = bench.step_bytes(bench.packed(pack, tokens_of(pack)), trained_tokens=others)
    return bench.step_bytes(plan) / plan.tree_tokens, packed / tokens_of(pack)


def pass_budget(samples: Sequence[Sample], plan: BatchPlan) -> int:
    """Tokens of the passes of ways that do not merge."""
    return max(plan.tree_tokens, max(one.tokens for one in samples))


def tokens_of(pack: Sequence[Sample]) -> int:
    """All of them."""
    return sum(one.tokens for one in pack)


def operations_of(bench: Bench, samples: Sequence[Sample], plan: BatchPlan) -> tuple[float, float]:
    """Operations of per-request training, and those of the tree."""

    def causal(count: int) -> int:
        return count * (count + 1) // 2

    apart = bench.flops(
        tokens_of(samples),
        sum(causal(one.tokens) for one in samples),
        plan.trained_tokens,
    )
    (tree,) = plan.trees
    pairs = int((tree.layout.positions_L + 1).sum())
    return apart, bench.flops(tree.tokens, pairs, len(tree.layout.head.places_R))


def main() -> None:
    options = _options()
    torch.set_num_threads(options.threads)
    clock = time.process_time if options.threads == 1 else time.perf_counter
    scale = 4 if options.quick else 1
    workloads = make_workloads(scale)
    if options.device != "cpu":
        clock = device_clock
        workloads += device_workloads(scale)
    bench = _warm_bench(options)
    columns = (*(f"speedup_vs_{way}" for way in WAYS), "flop_bound", "efficiency", "plan_share")
    print(f"{'workload':<12}{'tokens':>18}" + "".join(f"{_short(name):>19}" for name in columns))
    numbers: dict[str, float] = {}
    for workload in workloads:
        if options.only and workload.name not in options.only:
            continue
        rounds = 1 if options.quick else options.rounds
        slow = ("padded", "trl") if options.quick else LONG.get(workload.name, ())
        without = [*options.without, *slow]
        found = measure(bench, workload, rounds=rounds, clock=clock, without=without)
        if options.step:
            found |= step_numbers(bench, workload.samples, recompute=options.recompute)
        if options.profile:
            profile(bench, workload.samples, options.profile.with_suffix(f".{workload.name}.txt"))
        numbers |= {f"{workload.name}.{key}": value for key, value in found.items()}
        tokens = f"{found['sample_tokens']:.0f} > {found['tree_tokens']:.0f}"
        values = (f"{found[name]:>19.3g}" if name in found else f"{'':>19}" for name in columns)
        line = f"{workload.name:<12}{tokens:>18}" + "".join(values)
        print(f"{line}   {workload.describe}", flush=True)
        keep(numbers, options.json)


def _options() -> argparse.Namespace:
    parser = arguments(__doc__, quick="smaller model, shorter sequences, one round, nothing padded")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", help="workloads to run")
    parser.add_argument("--without", nargs="*", default=[], help="ways to leave out")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--bf16", action="store_true", help="the backbone in bfloat16")
    parser.add_argument("--hidden", type=int, help="channels of the model, a multiple of 64")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--shape", choices=sorted(SHAPES), help="the sizes of a Qwen 3 instead")
    parser.add_argument("--recompute", action="store_true", help="recompute activations")
    parser.add_argument("--compile", action="store_true", help="layers, in ways without SDPA")
    parser.add_argument("--step", action="store_true", help="a whole optimizer step besides")
    parser.add_argument("--profile", type=Path, help="write the operations of each tree here")
    return parser.parse_args()


def _warm_bench(options: argparse.Namespace) -> Bench:
    """The model; its first calls allocate, import and choose kernels."""
    bench = Bench(
        hidden=options.hidden or (128 if options.quick else 256),
        layers=options.layers or (2 if options.quick else 4),
        shape=options.shape or "",
        device=options.device,
        autocast=torch.bfloat16 if options.bf16 else None,
    )
    if options.recompute:
        recompute_activations(bench.model)
    if options.compile:
        compile_layers(bench.model)
    small = make_workloads(16)[0].samples
    bench.tree(small)
    if HAS_TRL:
        bench.trl(small, UNSPLIT)
    return bench


def _short(name: str) -> str:
    return name.removeprefix("speedup_")


if __name__ == "__main__":
    main()
