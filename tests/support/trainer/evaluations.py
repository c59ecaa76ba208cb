"""A trainer's evaluator between a record and scripted services."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterable

from forge.client.operator import Operator
from forge.core.errors import ForgeError
from forge.v1 import common_pb2, inference_pb2, scheduler_pb2
from forge.v1 import trainer_pb2 as pb
from services.trainer.checkpoint.history import Entry
from services.trainer.evaluation import DEFAULTS, Evaluator
from services.trainer.reporting.run_record import TrainingRecord
from services.trainer.setting_tables import EvaluationSettings
from tests.support.runtime.waiting import until


class System:
    """An operator's view of scheduler and inference: tasks end when they are told to."""

    all_ended = Operator.all_ended
    _retry_for_s = 0.0

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

    async def _list_groups(self, tag: str) -> list[scheduler_pb2.BatchGroup]:
        return [group async for group in self.groups(tag)]

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
            group = scheduler_pb2.BatchGroup(group=common_pb2.GroupRecord(task=task, state=state))
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
        self._version = 0
        """The newest there ever was."""
        self.start([])

    def start(self, history: list[Entry]) -> None:
        """A process that goes on from a checkpoint with this history."""
        self.record = TrainingRecord(max_steps=10, metrics_file="")
        self.evaluator = Evaluator(
            self.system,  # type: ignore[arg-type]
            self.record,
            tasks=self._tasks,
            settings=EvaluationSettings(every_steps=2, at_start=self._at_start),
            max_steps=10,
            run_id="run",
            poll_s=0.0,
        )
        self.rewind(history)

    def rewind(self, history: list[Entry]) -> None:
        self.record.rewind(history)
        self._publish()
        self.evaluator.resumed()

    def step(self, *, published: bool = True) -> None:
        if published:
            self._publish()
        version = self.record.weight_version
        self.record.append(pb.StepMetrics(step=self.record.step + 1, weight_version=version))
        self.evaluator.reached(self.record.step, published=published)

    def _publish(self) -> None:
        self._version += 1
        self.record.weight_version = self._version

    def history(self) -> list[Entry]:
        """As a checkpoint taken now has it."""
        return self.record.history.until(self.record.step)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    async def until_told(self, *steps: int) -> pb.Evaluation:
        """The last one, once those of these steps, and no others, were told."""
        await until(lambda: len(self.record.evaluations) >= len(steps))
        assert [each.step for each in self.record.evaluations] == list(steps)
        return self.record.evaluations[-1]

    def submitted(self) -> list[str]:
        """Step and row of each task, without run and version."""
        return [re.sub(r"^.*-s(\d+)(-v\d+)?", r"\1", name) for name in self.system.tasks]
