"""The settings of the scheduler that `benchmarks/window.py` compares, and what it loads them with.

Owns their names. The world around the core is `benchmarks/support/scheduler/queue_simulation.py`'s.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from benchmarks.support.scheduler.queue_simulation import BINS, Drive, Durations, Workload
from forge.core.queue.admission import GenerationLimit, Mode, QueueSettings

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
AT_COMMIT = "w03_at_commit"
"""W = 0.3 N, and only a commit moves the head."""
STATES = {"": "steady", ".cold": "start", ".waves": "waves", ".change": "change"}
"""Measures of every setting, by the suffix of the outcome's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Amount of simulation."""

    concurrency: int
    steps: int

    @property
    def batch(self) -> int:
        return self.concurrency // BATCHES_PER_N

    @property
    def kl_of_chance(self) -> float:
        return (BINS - 1) / (2 * self.batch)

    def kl_within(self, bound: float) -> float:
        """Largest shift of a batch over deciles of the duration: the bound beyond chance, and a
        standard deviation, so that the batches of a FIFO are within a bound of 0."""
        return self.kl_of_chance + math.sqrt(2 * (BINS - 1)) / (2 * self.batch) + bound


QUICK = Size(concurrency=256, steps=300)
FULL = Size(concurrency=1024, steps=480)


def fixed_settings(size: Size) -> Iterator[tuple[str, QueueSettings]]:
    """Every mode with every admission."""
    n = size.concurrency
    windows = {"w03": 0, "w05": n // 2, "wn": n}
    for admission in (GenerationLimit.WINDOW, GenerationLimit.RUNNING, GenerationLimit.AHEAD):
        suffix = "" if admission is GenerationLimit.WINDOW else f"_{admission.value}"
        base = replace(_base(size), admission=admission)
        yield f"fifo{suffix}", replace(base, mode=Mode.FIFO)
        for name, window in windows.items():
            yield f"{name}{suffix}", replace(base, window=window)
        yield f"greedy{suffix}", replace(base, mode=Mode.GREEDY)
    for name, window in windows.items():
        yield f"{name}{AT_ONCE}", replace(_base(size), window=window)
    yield ITEM, _base(size)
    yield AT_COMMIT, _base(size)
    # Between the ends of the scale: what a patient operator would find.
    for times in (2, 4):
        ahead = replace(_base(size), admission=GenerationLimit.AHEAD, ahead=times * n)
        yield f"greedy_ahead{times}", replace(ahead, mode=Mode.GREEDY)
        yield f"w03_ahead{times}", ahead
    # What an operator would choose who wants the very bounds that `adaptive` gets.
    for staleness in ADAPTIVE_STALENESS:
        ahead = replace(_base(size), admission=GenerationLimit.AHEAD, ahead=staleness * size.batch)
        yield f"fifo_s{staleness}", replace(ahead, mode=Mode.FIFO)
        for name, window in windows.items():
            yield f"{name}_s{staleness}", replace(ahead, window=window)
        # They are a step later than what is ahead: these keep to the same p99 as `adaptive`.
        within = replace(ahead, ahead=(staleness - 1) * size.batch)
        for name, window in windows.items():
            yield f"{name}_s{staleness - 1}", replace(within, window=window)
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


def drive_of(name: str) -> Drive:
    """Way in which the trainer of a setting takes its batches."""
    if name in (ITEM, AT_COMMIT):
        return Drive.ITEMS if name == ITEM else Drive.AT_COMMIT
    return Drive.AT_ONCE if name.endswith(AT_ONCE) else Drive.BATCHES


def _base(size: Size) -> QueueSettings:
    return QueueSettings(
        concurrency=size.concurrency,
        batch_groups=size.batch,
        rollout_lease_s=NEVER_S,
        rollout_timeout_s=NEVER_S,
        batch_lease_s=NEVER_S,
    )


def workloads(size: Size, seed: int, train_s: float = 0.0) -> dict[str, Workload]:
    """By what the name of the outcome ends with."""
    base = Workload(batch=size.batch, steps=size.steps, seed=seed, train_s=train_s)
    steady = replace(base, skip=size.steps // 2)
    started = replace(base, steps=3 * BATCHES_PER_N)
    return {
        "": steady,
        ".cold": started,
        ".waves": replace(started, wave=2 * size.concurrency, steps=6 * BATCHES_PER_N),
        ".change": replace(steady, skip=size.steps // 4, later=SLOWER),
        # `fifo` with S = 8 gives out eight batches at a time: the two above are whole such rounds.
        ".cold_44": replace(started, steps=44),
        ".waves_36": replace(started, wave=36 * size.batch, steps=3 * 36),
    }
