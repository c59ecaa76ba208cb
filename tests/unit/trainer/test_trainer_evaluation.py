"""Evaluation beside training: when it is due, its calls to other services, its results."""

from __future__ import annotations

from pathlib import Path

import pytest
import structlog

from forge.core.errors import ConfigError, InvalidArgument, Unavailable
from forge.v1 import common_pb2
from services.trainer.evaluation import Evaluator, run_id_in
from services.trainer.reporting.run_record import TrainingRecord
from services.trainer.reporting.sinks import scalars
from services.trainer.setting_tables import EvaluationSettings
from tests.support.runtime.waiting import settle, until
from tests.support.trainer.evaluations import Run, System, held_out


async def test_held_out_tasks_are_evaluated_at_the_interval(run: Run, system: System) -> None:
    """Their tasks are evaluations, named by run and step; each domain has its means, with the
    weight versions that sampled."""
    run.step()
    await settle()
    assert not system.tasks
    run.step()
    await until(lambda: len(system.tasks) == 2)
    assert run.submitted() == ["2-r0", "2-r1"]
    assert {task.purpose for task in system.tasks.values()} == {common_pb2.PURPOSE_EVAL}
    code, qa = system.tasks
    system.ended = {code: [1.0, 0.5], qa: [0.25]}

    told = await run.until_told(2)
    assert {task.tag for task in system.tasks.values()} == {told.tag}
    assert (told.weight_version, told.min_weight_version, told.max_weight_version) == (3, 7, 8)
    assert (told.rollouts, told.failed, told.mean_reward) == (4, 1, (1.0 + 0.5 + 0.25) / 4)
    assert (told.solved_share, told.length_tokens) == (0.25, 10.0)
    own = told.domains["code"]
    assert (own.mean_reward, own.solved_share, own.rollouts, own.failed) == (0.75, 0.5, 2, 0)
    assert dict(own.task_outcomes) == {"0": 0.75}
    assert own.mean_reward_low < 0.75 < own.mean_reward_high
    own = told.domains["qa"]
    assert (own.mean_reward, own.length_tokens, own.rollouts, own.failed) == (0.125, 10.0, 2, 1)
    assert dict(own.task_outcomes) == {"1": 0.125}
    # Two tasks leave more doubt than the scale is wide; more cannot be.
    assert 0 <= told.mean_reward_low < told.mean_reward < told.mean_reward_high <= 1
    scalar_names = scalars(told).keys()
    assert "domains/qa/mean_reward_low" in scalar_names
    assert not any("task_outcomes" in name for name in scalar_names)


async def test_evaluation_waits_until_every_worker_serves_the_weights(
    run: Run, system: System
) -> None:
    """So no rollout is sampled from older weights."""
    system.served = 2
    run.steps(2)
    await settle()
    assert not system.tasks and run.record.weight_version == 3
    system.served = 3
    await until(lambda: len(system.tasks) == 2)


async def test_evaluation_due_during_another_is_skipped_and_counted(
    run: Run, system: System
) -> None:
    """Training waits for none; the running evaluation reports how many were skipped."""
    with structlog.testing.capture_logs() as logged:
        run.steps(7)
        await until(lambda: len(system.tasks) == 2)
    assert [line["step"] for line in logged if line["event"] == "evaluation_skipped"] == [4, 6]
    system.end(1.0, 1.0)
    assert (await run.until_told(2)).skipped == 2
    run.step()
    await until(lambda: len(system.tasks) == 4)
    system.end(1.0, 1.0)
    assert (await run.until_told(2, 8)).skipped == 0


async def test_unpublished_weights_are_not_evaluated(run: Run, system: System) -> None:
    """The evaluation would measure the earlier ones."""
    run.step()
    run.step(published=False)
    await settle()
    assert not system.tasks
    run.steps(2)
    await until(lambda: len(system.tasks) == 2)
    system.end(1.0, 1.0)
    assert (await run.until_told(4)).skipped == 1


async def test_last_evaluation_waits_for_the_running_one(run: Run, system: System) -> None:
    """No newer weights will come; a repeated end changes nothing."""
    run.steps(10)
    run.evaluator.reached(10)
    await until(lambda: len(system.tasks) == 2)
    system.end(0.0, 0.0)
    await until(lambda: len(system.tasks) == 4)
    assert (await run.until_told(2)).skipped == 3
    system.end(1.0, 1.0)
    assert (await run.until_told(2, 10)).skipped == 0
    run.evaluator.reached(10)
    await settle()
    assert len(system.tasks) == 4


async def test_starting_weights_are_evaluated_on_request(system: System) -> None:
    """Under step 0, before any step."""
    run = Run(system, tasks=held_out("code"), at_start=True)
    await until(lambda: run.submitted() == ["0-r0"])
    system.end(0.0, 1.0)
    assert (await run.until_told(0)).weight_version == 1


async def test_evaluation_waits_for_an_unreachable_scheduler(run: Run, system: System) -> None:
    """At any moment; one line says so, and no task is lost or submitted twice."""
    system.faults = [Unavailable("no leader")] * 5
    with structlog.testing.capture_logs() as logged:
        run.steps(2)
        await until(lambda: len(system.tasks) == 2)
    assert [line["event"] for line in logged] == ["evaluation_waits", "evaluation_begun"]
    system.faults = [Unavailable("no leader")] * 5
    await until(lambda: not system.faults)
    system.end(1.0, 1.0)
    await run.until_told(2)
    assert len(system.tasks) == 2


async def test_refused_evaluation_is_logged_and_the_next_is_tried(run: Run, system: System) -> None:
    """Waiting would not help: for example a group larger than the scheduler allows."""
    system.faults = [InvalidArgument("tasks[0]: group_size 99 must be 1 to 64")]
    with structlog.testing.capture_logs() as logged:
        run.steps(2)
        await settle()
    (line,) = logged
    assert (line["event"], line["step"]) == ("evaluation_refused", 2)
    assert "group_size 99" in line["error"]
    run.steps(2)
    await until(lambda: run.submitted() == ["4-r0", "4-r1"])


async def test_evaluation_with_only_failed_rollouts_is_failed(run: Run, system: System) -> None:
    """Not a score of 0: no version is named."""
    run.steps(2)
    await until(lambda: len(system.tasks) == 2)
    assert run.record.status().evaluating
    system.end()
    told = await run.until_told(2)
    assert (told.rollouts, told.failed, told.mean_reward, told.length_tokens) == (4, 4, 0.0, 0.0)
    assert (told.min_weight_version, told.max_weight_version) == (-1, -1)
    await settle()
    assert not run.record.status().evaluating


async def test_stopped_evaluation_is_left_to_the_next_start(run: Run, system: System) -> None:
    """One line names its tag; a step that ends meanwhile begins none."""
    run.steps(2)
    await until(lambda: len(system.tasks) == 2)
    with structlog.testing.capture_logs() as logged:
        await run.evaluator.stop()
    (tag,) = {task.tag for task in system.tasks.values()}
    assert [(line["event"], line["tag"]) for line in logged] == [("evaluation_left_running", tag)]
    run.steps(2)
    await settle()
    assert len(system.tasks) == 2
    await run.evaluator.stop()


async def test_evaluations_of_other_runs_and_files_have_other_names(system: System) -> None:
    """Their results are never mixed in one cluster."""
    tags = set()
    for run_id, domains in (("a", ("code",)), ("b", ("code",)), ("a", ("code", "qa"))):
        evaluator = Evaluator(
            system,  # type: ignore[arg-type]
            TrainingRecord(max_steps=1, metrics_file=""),
            tasks=held_out(*domains),
            settings=EvaluationSettings(every_steps=1, at_end=False),
            max_steps=0,
            run_id=run_id,
        )
        tags.add(evaluator.tag(1))
    assert len(tags) == 3


def test_run_name_is_kept_with_the_checkpoints(tmp_path: Path) -> None:
    """If it cannot be stored, the error names the file."""
    name = run_id_in(tmp_path / "a")
    assert name and run_id_in(tmp_path / "a") == name
    assert run_id_in(tmp_path / "b") != name
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"file/run-id: File exists"):
        run_id_in(tmp_path / "file")
