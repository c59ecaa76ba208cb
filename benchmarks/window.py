"""Throughput, staleness and shift of every mode of the scheduler, in virtual time.

    python -m benchmarks.window [--quick] [--concurrency N] [--only NAMES] [--steady] [--seed N,N]
                                [--training T] [--json FILE] [--plot FILE] [--table FILE]

The core is the real one (`forge.core.queue.generation_queue`); the world around it is simulated
(`benchmarks/support/scheduler/queue_simulation.py`). Half of each run is left out, so figures are
those of a steady state. The cold start, the waves (a queue that runs dry and is filled again) and a
change of tasks in the middle are measured by themselves, from the first step on.

N is 16 batches; the full size has N = 1024, `--quick` N = 256. The smaller the batch, the larger
the divergence that chance alone gives it, which is printed too. With several seeds, each figure is
the median over them, ratios included.

`throughput` goes by the work in the groups that were trained on, `groups` by their number: a mode
that trains on short groups first has more of the second.
"""

from __future__ import annotations

import argparse
import gc
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from fnmatch import fnmatch
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from benchmarks.support.report import arguments, keep
from benchmarks.support.scheduler.queue_simulation import Drive, Outcome, Simulation, Workload
from benchmarks.support.scheduler.window_settings import (
    FULL,
    ITEM,
    QUICK,
    STATES,
    Size,
    adaptive_settings,
    drive_of,
    fixed_settings,
    workloads,
)
from forge.core.queue.admission import GenerationLimit, Mode, QueueSettings

DRIVES = {
    Drive.BATCHES: "",
    Drive.AT_ONCE: ", a batch at once",
    Drive.ITEMS: ", taken and committed item by item",
    Drive.AT_COMMIT: ", H moved by commits alone",
}
"""Description in the table."""


def measure(
    settings: Mapping[str, QueueSettings], loads: Mapping[str, Workload]
) -> dict[str, Outcome]:
    """By "<setting>" in the steady state, and "<setting>.<transient>"."""
    found = {}
    for suffix, load in loads.items():
        for name, chosen in settings.items():
            if suffix in STATES or "_s" in name:
                # A third of the time is the collector's, which finds little.
                gc.collect()
                gc.disable()
                found[f"{name}{suffix}"] = Simulation(chosen, load, drive_of(name)).play()
                gc.enable()
    return found


def against_the_front(
    found: Mapping[str, Outcome], settings: Mapping[str, QueueSettings], size: Size
) -> dict[str, float]:
    """`adaptive` over the best of the fixed settings, in each state.

    over_best_fixed    throughput, over the fastest with no larger p99 of staleness
    over_best_bounded  the same, of those whose mean KL is within the bound on shift, too
    kl_over_least      KL, over the least of those that are as fast, however stale
    over_front_line    throughput, over the best line from the origin through a fixed setting: what
                       one could get by running that setting on a part of the places, a harder
                       comparison than with the settings themselves
    """
    ratios = {}
    for state in _states_of(found, settings):
        fixed = [
            found[f"{name}{state}"]
            for name, chosen in settings.items()
            if chosen.mode is not Mode.ADAPTIVE
        ]
        for name, chosen in settings.items():
            if chosen.mode is not Mode.ADAPTIVE or not fixed:
                continue
            ours = found[f"{name}{state}"]
            reached = [one for one in fixed if one.staleness_p99 <= ours.staleness_p99]
            bounded = [one for one in reached if one.kl <= size.kl_within(chosen.max_shift_kl)]
            rivals = [one.kl for one in fixed if one.throughput >= ours.throughput]
            for what, rated in (("over_best_fixed", reached), ("over_best_bounded", bounded)):
                if rated:
                    fastest = max(one.throughput for one in rated)
                    ratios[f"{name}{state}.{what}"] = ours.throughput / fastest
            if rivals:
                ratios[f"{name}{state}.kl_over_least"] = ours.kl / min(rivals)
            line = max(one.throughput / one.staleness_p99 for one in fixed)
            ratios[f"{name}{state}.over_front_line"] = ours.throughput / ours.staleness_p99 / line
    return ratios


def against_the_same_bound(found: Mapping[str, Outcome]) -> dict[str, float]:
    """Throughput and shift of `adaptive` over those of `fifo` with the same bound, and of
    `windowed`, W = 0.3 N, with one batch less ahead, whose p99 is the same bound."""
    ratios = {}
    for name, ours in found.items():
        setting = name.partition(".")[0]
        mode, bound = setting.split("_")[:2] if "_" in setting else ("", "")
        if mode != "adaptive":
            continue
        for rival, ahead in (("fifo", int(bound[1:])), ("w03", int(bound[1:]) - 1)):
            if theirs := found.get(name.replace(setting, f"{rival}_s{ahead}")):
                ratios[f"{name}.over_{rival}"] = ours.throughput / theirs.throughput
                ratios[f"{name}.kl_over_{rival}"] = ours.kl / theirs.kl
    return ratios


def numbers_of(
    found: Mapping[str, Outcome], settings: Mapping[str, QueueSettings], size: Size
) -> dict[str, float]:
    numbers: dict[str, float] = {"kl_of_chance": size.kl_of_chance}
    for name, outcome in found.items():
        numbers |= {f"{name}.{what}": value for what, value in asdict(outcome).items()}
    return numbers | against_the_front(found, settings, size) | against_the_same_bound(found)


def middle(outcomes: Sequence[Outcome]) -> Outcome:
    """The median of each measure."""
    return Outcome(**medians([asdict(one) for one in outcomes]))


def medians(measured: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Medians of the numbers that each of them has."""
    names = [name for name in measured[0] if all(name in one for one in measured)]
    return {name: median(one[name] for one in measured) for name in names}


def show(found: Mapping[str, Outcome], measured: Sequence[Mapping[str, float]], size: Size) -> None:
    """`measured`: the numbers of each seed."""
    table = Table(title=f"N = {size.concurrency}, batches of {size.batch}")
    for name in ("mode", "throughput", "groups", "KL", "staleness mean", "p99"):
        table.add_column(name, justify="left" if name == "mode" else "right")
    for name, one in found.items():
        table.add_row(
            name,
            f"{one.throughput:.3f}",
            f"{one.groups:.3f}",
            f"{one.kl:.3f}",
            f"{one.staleness_mean:.1f}",
            f"{one.staleness_p99:.0f}",
        )
    console = Console()
    console.print(table)
    console.print(f"KL that chance alone gives such a batch: {size.kl_of_chance:.3f}")
    for name, value in medians(measured).items():
        if "_over_" in name or ".over_" in name:
            values = [one[name] for one in measured]
            spread = f" ({min(values):.3f} to {max(values):.3f})" if len(values) > 1 else ""
            console.print(f"{name}: {value:.3f}{spread}")


def tabulate(
    found: Mapping[str, Outcome], settings: Mapping[str, QueueSettings], size: Size
) -> str:
    """In Markdown: throughput, groups, KL, p99 of staleness, of every setting in every state."""
    states = _states_of(found, settings)
    lines = [f"| | {' | '.join(states.values())} |", "|---" * (1 + len(states)) + "|"]
    for name, chosen in settings.items():
        cells = [_label(name, chosen, size)]
        for state in states:
            one = found[f"{name}{state}"]
            shares = (f"{value:.3f}".lstrip("0") for value in (one.throughput, one.groups, one.kl))
            cells.append(f"{', '.join(shares)}, {one.staleness_p99:.0f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _states_of(
    found: Mapping[str, Outcome], settings: Mapping[str, QueueSettings]
) -> dict[str, str]:
    return {
        state: title
        for state, title in STATES.items()
        if all(f"{name}{state}" in found for name in settings)
    }


def _label(name: str, chosen: QueueSettings, size: Size) -> str:
    label = f"`{chosen.mode.value}`{DRIVES[drive_of(name)]}"
    if chosen.mode is Mode.ADAPTIVE:
        shift = "any" if math.isinf(chosen.max_shift_kl) else f"{chosen.max_shift_kl:g}"
        return f"**{label}, S = {chosen.max_staleness_p99:g}, shift {shift}**"
    if chosen.mode is Mode.WINDOWED:
        share = chosen.window / size.concurrency or 0.3
        label += f", W = {share:g} N"
    if chosen.admission is GenerationLimit.AHEAD:
        ahead = chosen.ahead or size.concurrency
        return f"{label}, `ahead` = {ahead // size.batch} batches"
    return f"{label}, `{chosen.admission.value}`"


def plot(found: dict[str, Outcome], path: Path) -> None:
    """Throughput and shift over the 99th percentile of staleness, in the steady state."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "forge"
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for name, one in found.items():
        if "." in name:
            continue
        ours = "adaptive" in name
        for axes, value in ((left, one.throughput), (right, one.kl)):
            axes.plot(one.staleness_p99, value, "D" if ours else "o", c="C3" if ours else "C0")
            axes.annotate(name, (one.staleness_p99, value), fontsize=6, rotation=20)
    left.set(xlabel="staleness, p99 (optimizer steps)", ylabel="throughput, of N busy places")
    right.set(xlabel="staleness, p99 (optimizer steps)", ylabel="KL from the queue", yscale="log")
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = arguments(__doc__, quick="a smaller N, and fewer steps")
    parser.add_argument("--concurrency", type=int, help="N, a multiple of 16, instead of 1024")
    parser.add_argument("--only", default="*", help="settings, by pattern, with commas: fifo*,wn")
    parser.add_argument("--steady", action="store_true", help="leave out start, waves and change")
    parser.add_argument(
        "--cold",
        type=_integers,
        metavar="STEPS,STEPS",
        help="nothing but so many steps after a start, of the settings with a bound: 64,144",
    )
    parser.add_argument("--plot", type=Path, help="write a plot (SVG) to this file")
    parser.add_argument("--table", type=Path, help="write a table (Markdown) to this file")
    parser.add_argument(
        "--seed", type=_integers, default=[0], metavar="N,N", help="of the tasks' durations"
    )
    parser.add_argument(
        "--training", type=float, default=0.0, metavar="T", help="an optimizer step takes T tasks"
    )
    options = parser.parse_args()
    size = QUICK if options.quick else FULL
    if options.concurrency:
        size = replace(size, concurrency=options.concurrency)
    settings = {
        name: chosen
        for name, chosen in (*fixed_settings(size), *adaptive_settings(size))
        if any(fnmatch(name, pattern) for pattern in options.only.split(","))
        and not (options.training and name == ITEM)
    }
    by_seed = [
        measure(settings, _chosen_loads(workloads(size, seed, options.training), options))
        for seed in options.seed
    ]
    found = {name: middle([one[name] for one in by_seed]) for name in by_seed[0]}
    measured = [numbers_of(one, settings, size) for one in by_seed]
    show(found, measured, size)
    keep(medians(measured), options.json)
    if options.plot:
        plot(found, options.plot)
    if options.table:
        options.table.write_text(tabulate(found, settings, size))


def _integers(text: str) -> list[int]:
    return [int(one) for one in text.split(",")]


def _chosen_loads(
    loads: Mapping[str, Workload], options: argparse.Namespace
) -> dict[str, Workload]:
    if options.steady:
        return {"": loads[""]}
    if options.cold:
        return {f".cold_{steps}": replace(loads[".cold"], steps=steps) for steps in options.cold}
    return dict(loads)


if __name__ == "__main__":
    main()
