"""Evaluation over restarts and restores: continued, repeated and reported ones."""

from __future__ import annotations

import pytest

from tests.support.runtime.waiting import settle, until
from tests.support.trainer.evaluations import Run, System, held_out


async def test_restart_follows_a_begun_evaluation(run: Run, system: System) -> None:
    """The checkpoint is of a later step, and another evaluation became due since; each is reported
    once, under the version of its step."""
    run.steps(3)
    await until(lambda: len(system.tasks) == 2)
    await run.evaluator.stop()
    run.start(run.history())
    await settle()
    assert run.record.step == 3 and len(system.tasks) == 2
    system.end(1.0, 0.0)
    told = await run.until_told(2)
    assert (told.weight_version, told.mean_reward) == (3, 0.5)
    assert len(system.tasks) == 2

    run.start(run.history())
    run.step()
    await until(lambda: run.submitted()[2:] == ["4-r0", "4-r1"])
    await run.until_told(2)


async def test_half_submitted_evaluation_is_completed(run: Run, system: System) -> None:
    """It was begun, so it is followed to its end."""
    run.steps(2)
    await until(lambda: len(system.tasks) == 2)
    await run.evaluator.stop()
    system.tasks.popitem()
    run.step()
    run.start(run.history())
    await until(lambda: run.submitted() == ["2-r0", "2-r1"])


async def test_restart_begins_no_evaluation_of_lost_weights(run: Run, system: System) -> None:
    """Skipped before the kill: newer weights would be reported under its name."""
    run.steps(5)
    await until(lambda: len(system.tasks) == 2)
    await run.evaluator.stop()
    system.end(1.0, 1.0)
    run.start(run.history())
    await run.until_told(2)
    await settle()
    assert run.submitted() == ["2-r0", "2-r1"]


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("killed", [False, True])
async def test_repeated_steps_are_evaluated_again(
    run: Run, system: System, told: bool, killed: bool
) -> None:
    """The earlier evaluation was of weights that no longer exist."""
    run.step()
    history = run.history()
    run.step()
    await until(lambda: len(system.tasks) == 2)
    if told:
        system.end(0.0, 0.0)
        await run.until_told(2)
        await settle()
    if killed:
        await run.evaluator.stop()
        run.start(history)
    else:
        run.rewind(history)
    assert not run.record.evaluations and not run.record.status().evaluating
    run.step()
    await until(lambda: run.submitted() == ["2-r0", "2-r1"] * 2)
    system.end(1.0, 1.0)
    again = await run.until_told(2)
    assert (again.mean_reward, again.weight_version, again.skipped) == (1.0, 5, 0)
    await settle()
    assert len(run.record.evaluations) == 1 and not run.record.status().evaluating


async def test_evaluation_that_ends_during_a_rewind_is_dropped(run: Run, system: System) -> None:
    """The record has gone back, the weights are not published yet."""
    run.step()
    history = run.history()
    run.step()
    await until(lambda: len(system.tasks) == 2)
    run.record.rewind(history)
    system.end(1.0, 1.0)
    await settle()
    assert not run.record.evaluations


async def test_restore_continues_evaluations_of_surviving_steps(run: Run, system: System) -> None:
    """And reports the skipped ones, except of undone steps."""
    run.steps(4)
    history = run.history()
    await until(lambda: len(system.tasks) == 2)
    run.steps(2)
    run.rewind(history)
    await settle()
    assert run.submitted() == ["2-r0", "2-r1"] and run.record.status().evaluating
    system.end(1.0, 1.0)
    await until(lambda: len(system.tasks) == 4)
    assert (await run.until_told(2)).skipped == 1


async def test_starting_weights_are_evaluated_once(
    system: System,
) -> None:
    """For any number of rewinds to them."""
    run = Run(system, tasks=held_out("code"), at_start=True)
    await until(lambda: run.submitted() == ["0-r0"])
    await run.evaluator.stop()
    run.start([])
    await settle()
    run.rewind([])
    system.end(1.0, 1.0)
    await run.until_told(0)
    assert run.submitted() == ["0-r0"]
