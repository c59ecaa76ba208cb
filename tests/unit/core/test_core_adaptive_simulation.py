"""What the simulation of `benchmarks/window.py` finds at a small size.

Seeds are fixed and time is virtual, so every figure is the same on each machine."""

from __future__ import annotations

from statistics import fmean

import pytest

from benchmarks.support.queue_simulation import Outcome, Simulation
from benchmarks.window import STATES, Size, adaptive_settings, fixed_settings, workloads

SIZE = Size(concurrency=128, steps=120)
SEEDS = range(4)


def outcomes(setting: str, state: str) -> list[Outcome]:
    """One for each seed."""
    settings = dict((*fixed_settings(SIZE), *adaptive_settings(SIZE)))
    loads = [workloads(SIZE, seed)[state] for seed in SEEDS]
    return [Simulation(settings[setting], load).play() for load in loads]


@pytest.mark.parametrize("state", STATES, ids=STATES.values())
def test_adaptive_is_not_behind_a_fifo_with_the_same_bound(state: str) -> None:
    """As much trained, 5 % less at most; no more shift, 10 % at most; and the bound kept."""
    ours, fifo = outcomes("adaptive_s28", state), outcomes("fifo_s28", state)
    assert all(one.staleness_p99 <= 28 for one in ours)
    assert fmean(one.throughput for one in ours) > 0.95 * fmean(one.throughput for one in fifo)
    assert fmean(one.kl for one in ours) < 1.1 * fmean(one.kl for one in fifo)


def test_measure_by_groups_favours_short_ones_and_that_by_work_does_not() -> None:
    """After a start `greedy` trains on short groups: many of them, and little work."""
    greedy, fifo = outcomes("greedy", ".cold"), outcomes("fifo", ".cold")
    assert all(one.groups > 1.5 * one.throughput for one in greedy)
    assert all(one.groups == pytest.approx(one.throughput, rel=0.15) for one in fifo)
