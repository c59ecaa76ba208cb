"""Evaluation beside training: when it is due, what is asked of the others, what comes of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path

import pytest
import structlog

from forge.client.operator import Operator
from forge.core.errors import ConfigError, ForgeError, InvalidArgument, Unavailable
from forge.v1 import common_pb2, inference_pb2, scheduler_pb2
from forge.v1 import trainer_pb2 as pb
from services.trainer.evaluation import DEFAULTS, Evaluator, Timetable, run_id_in
from services.trainer.record import TrainingRecord


class System:
    """An operator's view of scheduler and inference: tasks end when they are told to."""

    all_ended = Operator.all_ended

    def __init__(self) -> None:
        self.tasks: dict[str, common_pb2.Task] = {}
        self.ended: dict[str, list[float]] = {}
        """Outcomes of a task's rollouts; one that lacks some was given up."""
        self.served = 10**6
        self.version = 7
        """That samples."""
        self.faults: list[ForgeError] = []
        """Of the next calls."""

    def end(self, *outcomes: float) -> None:
        """Everything that was submitted ends like this."""
        self.ended |= {name: list(outcomes) for name in self.tasks if name not in self.ended}

    async def submit(self, tasks: Iterable[common_pb2.Task]) -> int:
        self._fault()
        new = {task.task_id: task for task in tasks if task.task_id not in self.tasks}
        self.tasks |= new
        return len(new)

    async def inference_status(self) -> inference_pb2.GetInferenceStatusResponse:
        self._fault()
        return inference_pb2.GetInferenceStatusResponse(weight_version=self.served)

    async def groups(self, tag: str) -> AsyncIterator[scheduler_pb2.BatchGroup]:
        await asyncio.sleep(0)
        self._fault()
        for task in [task for task in self.tasks.values() if task.tag == tag]:
            outcomes = self.ended.get(task.task_id)
            state = (
                common_pb2.GROUP_STATE_PENDING
                if outcomes is None
                else common_pb2.GROUP_STATE_EVALUATED
            )
            group = scheduler_pb2.BatchGroup(group={"task": task, "state": state})
            for outcome in outcomes or []:
                sealed = group.trajectories.add(
                    state=common_pb2.TRAJECTORY_STATE_SEALED,
                    sampled_tokens=10,
                    min_weight_version=self.version,
                    max_weight_version=self.version + 1,
                )
                sealed.rewards.add(kind=common_pb2.REWARD_KIND_OUTCOME, value=outcome)
            yield group

    def _fault(self) -> None:
        if self.faults:
            raise self.faults.pop(0)


def held_out(*domains: str, group_size: int = 2) -> list[common_pb2.Task]:
    tasks = []
    for domain in domains:
        task = common_pb2.Task(domain=domain, group_size=group_size, payload_json="{}")
        task.MergeFrom(common_pb2.Task(scaffold=DEFAULTS.scaffold, purpose=DEFAULTS.purpose))
        tasks.append(task)
    return tasks


class Run:
    """A trainer's record and evaluator; it takes steps, publishes, and starts again."""

    def __init__(self, system: System, *, tasks: list[common_pb2.Task], at_start: bool = False):
        self.system = system
        self._tasks = tasks
        self._at_start = at_start
        self.start([])

    def start(self, history: list[dict[str, object]]) -> None:
        """A process that goes on from a checkpoint with this history."""
        self.record = TrainingRecord(max_steps=10, metrics_file="")
        self.evaluator = Evaluator(
            self.system,  # type: ignore[arg-type]
            self.record,
            tasks=self._tasks,
            timetable=Timetable(every_steps=2, at_start=self._at_start, at_end=True, max_steps=10),
            run_id="run",
            poll_s=0.0,
        )
        self.rewind(history)

    def rewind(self, history: list[dict[str, object]]) -> None:
        self.record.rewind(history)
        self.record.weight_version += 1
        self.evaluator.resumed()

    def step(self, *, published: bool = True) -> None:
        self.record.weight_version += published
        version = self.record.weight_version
        self.record.append(pb.StepMetrics(step=self.record.step + 1, weight_version=version))
        self.evaluator.reached(self.record.step, published=published)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                await asyncio.sleep(0)

    async def until_told(self, *steps: int) -> pb.Evaluation:
        """The last one, once those of these steps, and no others, were told."""
        await self.until(lambda: len(self.record.evaluations) >= len(steps))
        assert [each.step for each in self.record.evaluations] == list(steps)
        return self.record.evaluations[-1]

    async def settle(self) -> None:
        """As long as anything could still happen by itself."""
        for _ in range(100):
            await asyncio.sleep(0)

    def submitted(self) -> list[str]:
        return [name.partition("-s")[2] for name in self.system.tasks]


@pytest.fixture
def system() -> System:
    return System()


@pytest.fixture
def run(system: System) -> Run:
    return Run(system, tasks=held_out("code", "qa"))


async def test_every_so_many_steps_held_out_tasks_are_scored(run: Run, system: System) -> None:
    """Their tasks are of evaluation and named by run and step; each domain has its means, and the
    versions are those that sampled."""
    run.step()
    await run.settle()
    assert not system.tasks
    run.step()
    await run.until(lambda: len(system.tasks) == 2)
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
    own = told.domains["qa"]
    assert (own.mean_reward, own.length_tokens, own.rollouts, own.failed) == (0.125, 10.0, 2, 1)


async def test_nothing_is_submitted_before_every_worker_serves_the_weights(
    run: Run, system: System
) -> None:
    """So no rollout is sampled from weights older than those it is about."""
    system.served = 2
    run.steps(2)
    await run.settle()
    assert not system.tasks and run.record.weight_version == 3
    system.served = 3
    await run.until(lambda: len(system.tasks) == 2)


async def test_one_that_falls_due_while_another_is_in_flight_is_skipped_and_counted(
    run: Run, system: System
) -> None:
    """Training waits for none; the one in flight says how many were left out."""
    with structlog.testing.capture_logs() as logged:
        run.steps(7)
        await run.until(lambda: len(system.tasks) == 2)
    assert [line["step"] for line in logged if line["event"] == "evaluation_skipped"] == [4, 6]
    system.end(1.0, 1.0)
    assert (await run.until_told(2)).skipped == 2
    run.step()
    await run.until(lambda: len(system.tasks) == 4)
    system.end(1.0, 1.0)
    assert (await run.until_told(2, 8)).skipped == 0


async def test_weights_that_are_not_published_are_not_evaluated(run: Run, system: System) -> None:
    """What would be measured are those before."""
    run.step()
    run.step(published=False)
    await run.settle()
    assert not system.tasks
    run.steps(2)
    await run.until(lambda: len(system.tasks) == 2)
    system.end(1.0, 1.0)
    assert (await run.until_told(4)).skipped == 1


async def test_the_last_one_waits_for_the_one_in_flight(run: Run, system: System) -> None:
    """No newer weights come, so it is worth it; being told twice of the end changes nothing."""
    run.steps(10)
    run.evaluator.reached(10)
    await run.until(lambda: len(system.tasks) == 2)
    system.end(0.0, 0.0)
    await run.until(lambda: len(system.tasks) == 4)
    assert (await run.until_told(2)).skipped == 3
    system.end(1.0, 1.0)
    assert (await run.until_told(2, 10)).skipped == 0
    run.evaluator.reached(10)
    await run.settle()
    assert len(system.tasks) == 4


async def test_starting_weights_are_evaluated_where_asked_for(system: System) -> None:
    """Under step 0, before any step is taken."""
    run = Run(system, tasks=held_out("code"), at_start=True)
    await run.until(lambda: run.submitted() == ["0-r0"])
    system.end(0.0, 1.0)
    assert (await run.until_told(0)).weight_version == 1


async def test_a_scheduler_that_is_away_is_waited_for(run: Run, system: System) -> None:
    """At whatever moment; one line says so, and nothing is lost or asked for twice."""
    system.faults = [Unavailable("no leader")] * 5
    with structlog.testing.capture_logs() as logged:
        run.steps(2)
        await run.until(lambda: len(system.tasks) == 2)
    assert [line["event"] for line in logged] == ["evaluation_waits", "evaluation_begun"]
    system.faults = [Unavailable("no leader")] * 5
    await run.until(lambda: not system.faults)
    system.end(1.0, 1.0)
    await run.until_told(2)
    assert len(system.tasks) == 2


async def test_one_that_the_scheduler_refuses_is_told_and_the_next_is_tried(
    run: Run, system: System
) -> None:
    """Waiting would not mend it: a group larger than the scheduler allows, say."""
    system.faults = [InvalidArgument("tasks[0]: group_size 99 must be 1 to 64")]
    with structlog.testing.capture_logs() as logged:
        run.steps(2)
        await run.settle()
    (line,) = logged
    assert (line["event"], line["step"]) == ("evaluation_refused", 2)
    assert "group_size 99" in line["error"]
    run.steps(2)
    await run.until(lambda: run.submitted() == ["4-r0", "4-r1"])


async def test_rollouts_that_all_failed_are_told_as_failed(run: Run, system: System) -> None:
    """Not as a model that scores 0: no version is named."""
    run.steps(2)
    await run.until(lambda: len(system.tasks) == 2)
    assert run.record.status().evaluating
    system.end()
    told = await run.until_told(2)
    assert (told.rollouts, told.failed, told.mean_reward, told.length_tokens) == (4, 4, 0.0, 0.0)
    assert (told.min_weight_version, told.max_weight_version) == (-1, -1)
    await run.settle()
    assert not run.record.status().evaluating


async def test_a_restart_follows_what_was_begun_and_samples_nothing_twice(
    run: Run, system: System
) -> None:
    """The checkpoint is of a later step, and another fell due since; each is told once, under the
    version its step had."""
    run.steps(3)
    await run.until(lambda: len(system.tasks) == 2)
    await run.evaluator.stop()
    run.start(run.record.history.until(run.record.step))
    await run.settle()
    assert run.record.step == 3 and len(system.tasks) == 2
    system.end(1.0, 0.0)
    told = await run.until_told(2)
    assert (told.weight_version, told.mean_reward) == (3, 0.5)
    assert len(system.tasks) == 2

    run.start(run.record.history.until(run.record.step))
    run.step()
    await run.until(lambda: run.submitted()[2:] == ["4-r0", "4-r1"])
    await run.until_told(2)


async def test_what_a_kill_left_half_submitted_is_completed(run: Run, system: System) -> None:
    """It was begun, so it is followed to its end."""
    run.steps(2)
    await run.until(lambda: len(system.tasks) == 2)
    await run.evaluator.stop()
    system.tasks.popitem()
    run.step()
    run.start(run.record.history.until(run.record.step))
    await run.until(lambda: run.submitted() == ["2-r0", "2-r1"])


async def test_a_restart_begins_none_whose_weights_are_gone(run: Run, system: System) -> None:
    """Skipped before the kill: newer weights would be told under its name."""
    run.steps(5)
    await run.until(lambda: len(system.tasks) == 2)
    await run.evaluator.stop()
    system.end(1.0, 1.0)
    run.start(run.record.history.until(run.record.step))
    await run.until_told(2)
    await run.settle()
    assert run.submitted() == ["2-r0", "2-r1"]


async def test_steps_taken_again_are_not_evaluated_again(run: Run, system: System) -> None:
    """What was begun before the restore has their names: its versions say what was measured."""
    run.step()
    history = run.record.history.until(run.record.step)
    run.step()
    await run.until(lambda: len(system.tasks) == 2)
    run.rewind(history)
    run.step()
    system.end(1.0, 1.0)
    assert (await run.until_told(2)).skipped == 0
    assert len(system.tasks) == 2


async def test_a_stop_leaves_it_to_the_next_start(run: Run, system: System) -> None:
    """One line names its tag; a step that ends meanwhile begins nothing."""
    run.steps(2)
    await run.until(lambda: len(system.tasks) == 2)
    with structlog.testing.capture_logs() as logged:
        await run.evaluator.stop()
    (tag,) = {task.tag for task in system.tasks.values()}
    assert [(line["event"], line["tag"]) for line in logged] == [("evaluation_left", tag)]
    run.steps(2)
    await run.settle()
    assert len(system.tasks) == 2
    await run.evaluator.stop()


async def test_another_run_and_another_file_have_names_of_their_own(system: System) -> None:
    """Their results are never taken for each other's, in one cluster."""
    tags = set()
    for run_id, domains in (("a", ("code",)), ("b", ("code",)), ("a", ("code", "qa"))):
        evaluator = Evaluator(
            system,  # type: ignore[arg-type]
            TrainingRecord(max_steps=1, metrics_file=""),
            tasks=held_out(*domains),
            timetable=Timetable(every_steps=1, at_start=False, at_end=False, max_steps=0),
            run_id=run_id,
        )
        tags.add(evaluator.tag(1))
    assert len(tags) == 3


def test_a_run_keeps_its_name_with_its_checkpoints(tmp_path: Path) -> None:
    """Given once; where it cannot be kept, the error names the file."""
    name = run_id_in(tmp_path / "a")
    assert name and run_id_in(tmp_path / "a") == name
    assert run_id_in(tmp_path / "b") != name
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"file/run-id: File exists"):
        run_id_in(tmp_path / "file")
