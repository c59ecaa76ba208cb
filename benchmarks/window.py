"""Throughput, staleness and shift of every mode of the scheduler, in virtual time.

    python -m benchmarks.window [--quick] [--concurrency N] [--only NAMES] [--steady] [--seed N]
                                [--json FILE] [--plot FILE] [--table FILE]

The real core (`forge.core.queue.generation_queue`) with a simulated world around it, which
`benchmarks/support/queue_simulation.py` describes. Half of each run is left out, so that figures
are those of a steady state; the cold start, the waves (a queue that runs dry and is filled again)
and a change of tasks in the middle are measured by themselves, from the first step on.

N is 16 batches; the full size has N = 1024, `--quick` N = 256. The smaller the batch, the larger
the divergence that chance alone gives it, which is printed too.

`throughput` goes by the work in the groups that were trained on, `groups` by their number: a mode
that trains on short groups first has more of the second.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatch
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.support.queue_simulation import (
    BINS,
    Drive,
    Durations,
    Outcome,
    Simulation,
    Workload,
)
from benchmarks.support.report import arguments, keep
from forge.core.queue.admission import Admission, Mode, QueueSettings

NEVER_S = 1e9
"""No claim ends in virtual time."""
BATCHES_PER_N = 16
ADAPTIVE_STALENESS = (8, 28, 60)
ADAPTIVE_SHIFT = {"": 0.0, "_kl05": 0.05, "_any": math.inf}
"""By what the name of the setting ends with."""
SLOWER = Durations(mean=3.0, slow_share=0.25, slow_factor=4.0)
"""After a change in the middle of a run: three times as long, and more alike."""
AT_ONCE = "_at_once"
"""Name of a setting whose trainer asks only once a whole batch is complete ends with it."""
ITEM = "item"
"""W = 0.3 N, taken and committed group by group."""
STATES = {"": "steady", ".cold": "start", ".waves": "waves", ".change": "change"}
"""What every setting is measured in, by what the name of the outcome ends with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much to simulate."""

    concurrency: int
    steps: int

    @property
    def batch(self) -> int:
        return self.concurrency // BATCHES_PER_N

    @property
    def kl_of_chance(self) -> float:
        return (BINS - 1) / (2 * self.batch)

    def kl_within(self, bound: float) -> float:
        """What a batch may have whose shift beyond chance is bounded, over deciles of the duration,
        and a standard deviation: so that the batches of a FIFO are within a bound of 0."""
        return self.kl_of_chance + math.sqrt(2 * (BINS - 1)) / (2 * self.batch) + bound


QUICK = Size(concurrency=256, steps=300)
FULL = Size(concurrency=1024, steps=480)


def fixed_settings(size: Size) -> Iterator[tuple[str, QueueSettings]]:
    """Every mode with every admission."""
    n = size.concurrency
    windows = {"w03": 0, "w05": n // 2, "wn": n}
    for admission in (Admission.WINDOW, Admission.RUNNING, Admission.AHEAD):
        suffix = "" if admission is Admission.WINDOW else f"_{admission.value}"
        base = replace(_base(size), admission=admission)
        yield f"fifo{suffix}", replace(base, mode=Mode.FIFO)
        for name, window in windows.items():
            yield f"{name}{suffix}", replace(base, window=window)
        yield f"greedy{suffix}", replace(base, mode=Mode.GREEDY)
    for name, window in windows.items():
        yield f"{name}{AT_ONCE}", replace(_base(size), window=window)
    yield ITEM, _base(size)
    # Between the ends of the scale: what a patient operator would find.
    for times in (2, 4):
        ahead = replace(_base(size), admission=Admission.AHEAD, ahead=times * n)
        yield f"greedy_ahead{times}", replace(ahead, mode=Mode.GREEDY)
        yield f"w03_ahead{times}", ahead
    # What an operator would choose who wants the very bounds that `adaptive` gets.
    for staleness in ADAPTIVE_STALENESS:
        ahead = replace(_base(size), admission=Admission.AHEAD, ahead=staleness * size.batch)
        yield f"fifo_s{staleness}", replace(ahead, mode=Mode.FIFO)
        for name, window in windows.items():
            yield f"{name}_s{staleness}", replace(ahead, window=window)
        # With fewer than N ahead its batches go out short, by a clock that this world has not.
        if ahead.ahead >= n:
            yield f"greedy_s{staleness}", replace(ahead, mode=Mode.GREEDY)


def adaptive_settings(size: Size) -> Iterator[tuple[str, QueueSettings]]:
    for staleness in ADAPTIVE_STALENESS:
        for suffix, shift_kl in ADAPTIVE_SHIFT.items():
            yield (
                f"adaptive_s{staleness}{suffix}",
                replace(
                    _base(size),
                    mode=Mode.ADAPTIVE,
                    max_staleness_p99=staleness,
                    max_shift_kl=shift_kl,
                ),
            )


DRIVES = {
    Drive.BATCHES: "",
    Drive.AT_ONCE: ", a batch at once",
    Drive.ITEMS: ", taken and committed item by item",
}
"""What a table says of them."""


def drive_of(name: str) -> Drive:
    """How the trainer of a setting takes its batches."""
    if name == ITEM:
        return Drive.ITEMS
    return Drive.AT_ONCE if name.endswith(AT_ONCE) else Drive.BATCHES


def _base(size: Size) -> QueueSettings:
    return QueueSettings(
        concurrency=size.concurrency,
        batch_groups=size.batch,
        rollout_lease_s=NEVER_S,
        rollout_timeout_s=NEVER_S,
        batch_lease_s=NEVER_S,
    )


def workloads(size: Size, seed: int) -> dict[str, Workload]:
    """By what the name of the outcome ends with."""
    steady = Workload(batch=size.batch, steps=size.steps, skip=size.steps // 2, seed=seed)
    started = Workload(batch=size.batch, steps=3 * BATCHES_PER_N, seed=seed)
    return {
        "": steady,
        ".cold": started,
        ".waves": replace(started, wave=2 * size.concurrency, steps=6 * BATCHES_PER_N),
        ".change": replace(steady, skip=size.steps // 4, later=SLOWER),
        # `fifo` with S = 8 gives out eight batches at a time: the two above are whole such rounds.
        ".cold_44": replace(started, steps=44),
        ".waves_36": replace(started, wave=36 * size.batch, steps=3 * 36),
    }


def measure(
    settings: Mapping[str, QueueSettings], loads: Mapping[str, Workload]
) -> dict[str, Outcome]:
    """By "<setting>" in the steady state, and "<setting>.<transient>"."""
    return {
        f"{name}{suffix}": Simulation(chosen, load, drive_of(name)).play()
        for suffix, load in loads.items()
        for name, chosen in settings.items()
        if suffix in STATES or "_s" in name
    }


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


def against_fifo(found: Mapping[str, Outcome]) -> dict[str, float]:
    """Throughput and shift of `adaptive` over those of `fifo` with the same bound, everywhere."""
    ratios = {}
    for name, ours in found.items():
        setting = name.partition(".")[0]
        mode, bound = setting.split("_")[:2] if "_" in setting else ("", "")
        fifo = found.get(name.replace(setting, f"fifo_{bound}"))
        if mode == "adaptive" and fifo:
            ratios[f"{name}.over_fifo"] = ours.throughput / fifo.throughput
            ratios[f"{name}.kl_over_fifo"] = ours.kl / fifo.kl
    return ratios


def numbers_of(
    found: Mapping[str, Outcome], settings: Mapping[str, QueueSettings], size: Size
) -> dict[str, float]:
    numbers: dict[str, float] = {"kl_of_chance": size.kl_of_chance}
    for name, outcome in found.items():
        numbers |= {f"{name}.{what}": value for what, value in asdict(outcome).items()}
    return numbers | against_the_front(found, settings, size) | against_fifo(found)


def show(found: Mapping[str, Outcome], numbers: Mapping[str, float], size: Size) -> None:
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
    for name, value in numbers.items():
        if "_over_" in name or ".over_" in name:
            console.print(f"{name}: {value:.3f}")


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
    if chosen.admission is Admission.AHEAD:
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
        type=lambda text: [int(steps) for steps in text.split(",")],
        metavar="STEPS,STEPS",
        help="nothing but so many steps after a start, of the settings with a bound: 64,144",
    )
    parser.add_argument("--plot", type=Path, help="write a plot (SVG) to this file")
    parser.add_argument("--table", type=Path, help="write a table (Markdown) to this file")
    parser.add_argument("--seed", type=int, default=0, help="of the tasks' durations")
    options = parser.parse_args()
    size = QUICK if options.quick else FULL
    if options.concurrency:
        size = replace(size, concurrency=options.concurrency)
    settings = {
        name: chosen
        for name, chosen in (*fixed_settings(size), *adaptive_settings(size))
        if any(fnmatch(name, pattern) for pattern in options.only.split(","))
    }
    loads = workloads(size, options.seed)
    if options.steady:
        loads = {"": loads[""]}
    elif options.cold:
        loads = {f".cold_{steps}": replace(loads[".cold"], steps=steps) for steps in options.cold}
    found = measure(settings, loads)
    numbers = numbers_of(found, settings, size)
    show(found, numbers, size)
    keep(numbers, options.json)
    if options.plot:
        plot(found, options.plot)
    if options.table:
        options.table.write_text(tabulate(found, settings, size))


if __name__ == "__main__":
    main()
