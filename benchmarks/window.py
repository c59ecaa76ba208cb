"""Throughput, staleness and shift of every mode of the scheduler, in virtual time.

    python -m benchmarks.window [--quick] [--seed N] [--json FILE] [--plot FILE]

The real core (`forge.core.generation`) with a simulated world around it, which
`benchmarks/support/queue_simulation.py` describes. Half of each run is left out, so that figures
are those of a steady state; the cold start, the waves (a queue that runs dry and is filled again)
and a change of tasks in the middle are measured by themselves, from the first step on.

N is 16 batches; the full size has N = 1024, `--quick` N = 256. The smaller the batch, the larger
the divergence that chance alone gives it, which is printed too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.support.queue_simulation import BINS, Durations, Outcome, Simulation, Workload
from benchmarks.support.report import arguments, keep
from forge.core.admission import Admission, Mode, QueueSettings

NEVER_S = 1e9
"""No claim ends in virtual time."""
BATCHES_PER_N = 16
ADAPTIVE_STALENESS = (8, 28, 60)
SLOWER = Durations(mean=3.0, slow_share=0.25, slow_factor=4.0)
"""After a change in the middle of a run: three times as long, and more alike."""


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
    # Between the ends of the scale: what a patient operator would find.
    for times in (2, 4):
        ahead = replace(_base(size), admission=Admission.AHEAD, ahead=times * n)
        yield f"greedy_ahead{times}", replace(ahead, mode=Mode.GREEDY)
        yield f"w03_ahead{times}", ahead
    # What an operator would choose who wants the very bounds that `adaptive` gets.
    for staleness in ADAPTIVE_STALENESS:
        ahead = replace(_base(size), admission=Admission.AHEAD, ahead=staleness * size.batch)
        yield f"fifo_s{staleness}", replace(ahead, mode=Mode.FIFO)
        yield f"w03_s{staleness}", ahead
        # With fewer than N ahead its batches go out short, by a clock that this world has not.
        if ahead.ahead >= n:
            yield f"greedy_s{staleness}", replace(ahead, mode=Mode.GREEDY)


def adaptive_settings(size: Size) -> Iterator[tuple[str, QueueSettings]]:
    for staleness in ADAPTIVE_STALENESS:
        yield f"adaptive_s{staleness}", _adaptive(size, staleness)


def _adaptive(size: Size, staleness: float) -> QueueSettings:
    return replace(_base(size), mode=Mode.ADAPTIVE, max_staleness_p99=staleness, max_shift_kl=0.0)


def _base(size: Size) -> QueueSettings:
    return QueueSettings(
        concurrency=size.concurrency,
        batch_groups=size.batch,
        rollout_lease_s=NEVER_S,
        rollout_timeout_s=NEVER_S,
        batch_lease_s=NEVER_S,
    )


def measure(size: Size, seed: int) -> dict[str, Outcome]:
    """By "<mode>" in the steady state, and "<mode>.<transient>"."""
    steady = Workload(batch=size.batch, steps=size.steps, skip=size.steps // 2, seed=seed)
    found: dict[str, Outcome] = {}
    for name, settings in (*fixed_settings(size), *adaptive_settings(size)):
        found[name] = Simulation(settings, steady).play()
    # The shortest name is for the bound in the middle.
    found["adaptive"] = found[f"adaptive_s{ADAPTIVE_STALENESS[1]}"]
    started = Workload(batch=size.batch, steps=3 * BATCHES_PER_N, seed=seed)
    transients = {
        "cold": started,
        "waves": replace(started, wave=2 * size.concurrency, steps=6 * BATCHES_PER_N),
        # `fifo` with S = 8 gives out eight batches at a time: the two above are whole such rounds.
        "cold_44": replace(started, steps=44),
        "waves_36": replace(started, wave=36 * size.batch, steps=3 * 36),
        "change": replace(steady, skip=size.steps // 4, later=SLOWER),
    }
    chosen = dict(fixed_settings(size)) | dict(adaptive_settings(size))
    bounded = [f"{mode}_s{bound}" for bound in ADAPTIVE_STALENESS for mode in ("fifo", "adaptive")]
    for name in ("fifo", "w03", "wn", "greedy", "greedy_ahead4", *bounded):
        for transient, load in transients.items():
            found[f"{name}.{transient}"] = Simulation(chosen[name], load).play()
    return found


def against_the_front(found: dict[str, Outcome]) -> dict[str, float]:
    """Throughput of `adaptive` over that of the fixed settings, at the same p99 of staleness.

    The best line from the origin through a fixed setting is what one could get by running that
    setting on a part of the places: a harder comparison than with the settings themselves.
    """
    fixed = [found[name] for name in found if "adaptive" not in name and "." not in name]
    best = max(one.throughput / one.staleness_p99 for one in fixed)
    ratios = {}
    for staleness in ADAPTIVE_STALENESS:
        ours = found[f"adaptive_s{staleness}"]
        reached = [one for one in fixed if one.staleness_p99 <= ours.staleness_p99]
        if reached:
            fastest = max(one.throughput for one in reached)
            ratios[f"adaptive_s{staleness}.over_best_fixed"] = ours.throughput / fastest
        ratios[f"adaptive_s{staleness}.over_front_line"] = (
            ours.throughput / ours.staleness_p99 / best
        )
        rivals = [one.kl for one in fixed if one.throughput >= ours.throughput]
        ratios[f"adaptive_s{staleness}.kl_over_least"] = ours.kl / min(rivals)
    return ratios


def against_fifo(found: dict[str, Outcome]) -> dict[str, float]:
    """Throughput and shift of `adaptive` over those of `fifo` with the same bound, everywhere."""
    ratios = {}
    for name, ours in found.items():
        fifo = found.get(name.replace("adaptive", "fifo"))
        if name.startswith("adaptive_s") and fifo:
            ratios[f"{name}.over_fifo"] = ours.throughput / fifo.throughput
            ratios[f"{name}.kl_over_fifo"] = ours.kl / fifo.kl
    return ratios


def numbers_of(found: dict[str, Outcome], size: Size) -> dict[str, float]:
    numbers: dict[str, float] = {"kl_of_chance": size.kl_of_chance}
    for name, outcome in found.items():
        numbers[f"{name}.throughput"] = outcome.throughput
        numbers[f"{name}.kl"] = outcome.kl
        numbers[f"{name}.staleness_mean"] = outcome.staleness_mean
        numbers[f"{name}.staleness_p99"] = outcome.staleness_p99
    return numbers | against_the_front(found) | against_fifo(found)


def show(found: dict[str, Outcome], numbers: dict[str, float], size: Size) -> None:
    table = Table(title=f"N = {size.concurrency}, batches of {size.batch}")
    for name in ("mode", "throughput", "KL", "staleness mean", "p99"):
        table.add_column(name, justify="left" if name == "mode" else "right")
    for name, one in found.items():
        table.add_row(
            name,
            f"{one.throughput:.3f}",
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


def plot(found: dict[str, Outcome], path: Path) -> None:
    """Throughput and shift over the 99th percentile of staleness, in the steady state."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "forge"
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for name, one in found.items():
        if "." in name or name == "adaptive":
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
    parser.add_argument("--plot", type=Path, help="write a plot (SVG) to this file")
    parser.add_argument("--seed", type=int, default=0, help="of the tasks' durations")
    options = parser.parse_args()
    size = QUICK if options.quick else FULL
    found = measure(size, options.seed)
    numbers = numbers_of(found, size)
    show(found, numbers, size)
    keep(numbers, options.json)
    if options.plot:
        plot(found, options.plot)


if __name__ == "__main__":
    main()
