"""The yield J over a crash: checkpoints, downtime, resuming and steps taken again all cost."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from forge.core.errors import NotFound, Unavailable
from services.trainer.reporting.run_clock import RunClock
from services.trainer.reporting.step_metrics import training_yield
from tests.support.trainer.world import (
    Run,
    World,
    run_in,
)

TAKES_S = {"take": 1.0, "step": 2.0, "copy": 0.5, "capture": 3.0, "restore": 7.0}
STEP_S = 3.5
"""Waiting, computing, copying the weights."""


@pytest.fixture
def world() -> World:
    """A world in which everything takes its time."""
    world = World(now_s=1000.0, takes_s=dict(TAKES_S))
    world.disk.set()
    return world


@asynccontextmanager
async def process(world: World, folder: Path) -> AsyncIterator[tuple[Run, RunClock]]:
    """One trainer process: ten steps at most, a checkpoint every second one."""
    clock = RunClock(
        folder / "run-clock.json",
        # Only differences of a monotonic clock mean anything, and only within one process.
        monotonic_s=lambda began=world.now_s: world.now_s - began + 5.0,  # type: ignore[misc]
        unix_s=lambda: world.now_s,
    )
    async with run_in(world, max_steps=10, clock=clock) as run:
        yield run, clock


def seconds(run: Run) -> float:
    """What J divides by, found from J itself: 100 tokens and one trajectory a step, from 0 to 1."""
    steps = list(run.record.steps)
    for number, step in enumerate(steps):
        step.trained_tokens, step.trajectories = 100, 1
        step.mean_reward = float(number >= len(steps) // 2)
    return 100.0 / training_yield(steps).j


async def four_steps(world: World, folder: Path) -> float:
    """Without any trouble."""
    async with process(world, folder) as (run, _):
        await run.advance(5)
        assert run.record.step == 4
        return seconds(run)


async def test_copying_a_checkpoint_counts_as_lost_time(world: World, tmp_path: Path) -> None:
    """Training stops while it is copied; loading before the first step does not count."""
    assert await four_steps(world, tmp_path) == pytest.approx(4 * STEP_S + TAKES_S["capture"])


async def test_crash_costs_its_lost_steps(world: World, tmp_path: Path) -> None:
    """J falls by exactly the repeated step, the time without a process and the resume."""
    (tmp_path / "clean").mkdir()
    clean_s = await four_steps(
        World(now_s=0.0, takes_s=dict(TAKES_S), disk=world.disk), tmp_path / "clean"
    )
    async with process(world, tmp_path) as (run, _):
        await run.advance(4)
        assert (run.record.step, run.record.checkpoint_step) == (3, 2)
    world.now_s += 60.0
    async with process(world, tmp_path) as (run, _):
        await run.advance(3)
        assert run.record.step == 4
        crashed_s = seconds(run)
        (third, fourth) = run.record.steps[2:]
    lost_s = STEP_S + 60.0 + TAKES_S["restore"] + TAKES_S["copy"]
    assert crashed_s - clean_s == pytest.approx(lost_s)
    # The checkpoint of step 2 was captured before the crash, on the way to a step that is gone.
    assert third.lost_s == pytest.approx(lost_s + TAKES_S["capture"])
    assert (fourth.lost_s, third.checkpoint_s) == (0.0, 0.0)


async def test_crashes_before_the_first_checkpoint_count(world: World, tmp_path: Path) -> None:
    """One step is taken and lost twice."""
    for _ in range(2):
        async with process(world, tmp_path) as (run, _):
            await run.advance(2)
            assert run.record.step == 1
        world.now_s += 10.0
    async with process(world, tmp_path) as (run, _):
        await run.advance(3)
        lost_s = 2 * (STEP_S + 10.0 + TAKES_S["restore"] + TAKES_S["copy"])
        assert run.record.steps[0].lost_s == pytest.approx(lost_s)
        assert seconds(run) == pytest.approx(lost_s + 2 * STEP_S)


async def test_stop_on_purpose_costs_only_the_resume(world: World, tmp_path: Path) -> None:
    """A run stopped over a weekend lost no time by it; a crash after it counts from then on."""
    async with process(world, tmp_path) as (run, clock):
        await run.advance(3)
        clock.stop()
        world.now_s += 1.0
        clock.stop()
    world.now_s += 200_000.0
    async with process(world, tmp_path) as (run, _):
        await run.advance(2)
        resumed_s = TAKES_S["restore"] + TAKES_S["copy"]
        expected_s = resumed_s + TAKES_S["capture"]
        assert run.record.steps[2].lost_s == pytest.approx(expected_s)
    world.now_s += 30.0
    async with process(world, tmp_path) as (run, _):
        await run.advance(2)
        expected_s += STEP_S + 30.0 + resumed_s
        assert run.record.steps[2].lost_s == pytest.approx(expected_s)


def discard(world: World) -> None:
    world.faults["commit"] = NotFound("batch")


def skip(world: World) -> None:
    world.skip = "a gradient that is not a number"


@pytest.mark.parametrize(
    ("trouble", "resumed_s"), [(discard, 7.5), (skip, 0.0)], ids=["discarded", "skipped"]
)
async def test_discarded_step_counts_as_lost_time(
    world: World, tmp_path: Path, trouble: Callable[[World], None], resumed_s: float
) -> None:
    """Also without a crash: a batch whose step was discarded, with its resume, or without a usable
    gradient."""
    async with process(world, tmp_path) as (run, _):
        await run.advance(2)
        trouble(world)
        await run.advance(1)
        assert run.record.step == 1
        while run.record.step != 2:
            await run.advance(1)
        # Nothing is on disk yet: a discarded step takes the first one along.
        (*_, second) = run.record.steps
        wasted_s = TAKES_S["take"] + TAKES_S["step"]
        total_s = sum(one.lost_s for one in run.record.steps)
        taken_again_s = STEP_S if trouble is discard else 0.0
        assert total_s == pytest.approx(wasted_s + resumed_s + taken_again_s)
        assert second.step == 2


async def test_outage_during_a_resume_counts(world: World, tmp_path: Path) -> None:
    """Each attempt to resume takes time."""
    async with process(world, tmp_path) as (run, _):
        await run.advance(2)
    async with process(world, tmp_path) as (run, _):
        world.faults["rewind"] = Unavailable("scheduler")
        with pytest.raises(Unavailable):
            await run.advance(1)
        world.now_s += 5.0
        await run.advance(2)
        expected_s = STEP_S + 2 * TAKES_S["restore"] + 5.0 + TAKES_S["copy"]
        assert run.record.steps[0].lost_s == pytest.approx(expected_s)
