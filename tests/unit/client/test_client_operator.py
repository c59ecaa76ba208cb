"""The operator's SDK: bounded submission, results by tag, steps as they happen."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio

from forge.client import operator as operator_module
from forge.client.operator import BATCH_BYTES, BATCH_TASKS, Operator, batches
from forge.core.errors import DeadlineExceeded, PermissionDenied
from forge.runtime.coordination import Instance
from forge.runtime.rpc.channel import Channels
from forge.runtime.security.credentials import Security
from forge.runtime.security.tokens import Keyring
from forge.v1 import common_pb2, scheduler_pb2, scheduler_pb2_grpc, trainer_pb2, trainer_pb2_grpc
from tests.support.agents.scripted_gateway import Instances


class Scheduler(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Remembers what was submitted, tells what it is given to tell."""

    def __init__(self) -> None:
        self.submitted: list[list[str]] = []
        self.groups: list[scheduler_pb2.BatchGroup] = []
        self.stuck = False
        """Whether a list of groups never ends."""
        self.outages: deque[Callable[[], None]] = deque()
        """Called by each list that fails."""

    async def SubmitTasks(self, request: Any, context: Any) -> Any:
        self.submitted.append([task.task_id for task in request.tasks])
        return scheduler_pb2.SubmitTasksResponse(accepted=len(request.tasks))

    async def ListGroups(self, request: Any, context: Any) -> AsyncIterator[Any]:
        if self.outages:
            self.outages.popleft()()
            await context.abort(grpc.StatusCode.UNAVAILABLE, "no scheduler leads")
        for group in self.groups:
            if group.group.task.tag == request.tag:
                yield scheduler_pb2.ListGroupsResponse(group=group)
        if self.stuck:
            await asyncio.Event().wait()


class Trainer(trainer_pb2_grpc.TrainerServiceServicer):
    """Streams steps, two at a time, then breaks off."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.ending = grpc.StatusCode.UNAVAILABLE

    async def WatchSteps(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self.asked.append(request.after_step)
        for step in range(request.after_step + 1, request.after_step + 3):
            yield trainer_pb2.WatchStepsResponse(metrics=trainer_pb2.StepMetrics(step=step))
        await context.abort(self.ending, "restarting")


class Everywhere:
    """A coordinator whose every kind is one address, and leads."""

    def __init__(self, address: str) -> None:
        self._address = address

    def discover(self, kind: str) -> Instances:
        return Instances(
            Instance(
                kind=kind,
                instance_id=f"{kind}-0",
                address=self._address,
                metadata={"leader": "true"},
                revision=1,
            )
        )


class System:
    def __init__(self) -> None:
        self.scheduler = Scheduler()
        self.trainer = Trainer()


@pytest.fixture
def system() -> System:
    return System()


@pytest_asyncio.fixture
async def operator(system: System, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Operator]:
    monkeypatch.setattr(operator_module, "RECONNECT_S", 0.0)
    server = grpc.aio.server()
    scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(system.scheduler, server)
    trainer_pb2_grpc.add_TrainerServiceServicer_to_server(system.trainer, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    channels = Channels(Security(Keyring.from_bytes(b"k" * 32)))
    yield Operator(Everywhere(address), channels)  # type: ignore[arg-type]
    await channels.close()
    await server.stop(None)


def make_tasks(count: int, *, payload_bytes: int = 2) -> list[common_pb2.Task]:
    return [
        common_pb2.Task(task_id=f"t{number}", payload_json="x" * payload_bytes, tag="test")
        for number in range(count)
    ]


def group(
    name: str, domain: str, state: Any, *outcomes: float | None, version: int = 3
) -> scheduler_pb2.BatchGroup:
    """A group with one trajectory per outcome, which began under `version` and saw the next one
    too; None for one that was abandoned."""
    trajectories = [
        common_pb2.TrajectorySummary(
            state=common_pb2.TRAJECTORY_STATE_ABANDONED
            if outcome is None
            else common_pb2.TRAJECTORY_STATE_SEALED,
            rewards=[
                common_pb2.RewardEvent(
                    name="right", kind=common_pb2.REWARD_KIND_OUTCOME, value=outcome or 0.0
                ),
                common_pb2.RewardEvent(name="speed", kind=common_pb2.REWARD_KIND_SPEED, value=0.5),
            ],
            sampled_tokens=10,
            min_weight_version=version,
            max_weight_version=version + 1,
        )
        for outcome in outcomes
    ]
    task = common_pb2.Task(task_id=name, domain=domain, group_size=2, tag="test")
    record = common_pb2.GroupRecord(task=task, state=state)
    return scheduler_pb2.BatchGroup(group=record, trajectories=trajectories)


async def test_tasks_are_submitted_in_bounded_calls(operator: Operator, system: System) -> None:
    """Any number of tasks, in order; the answer counts the new ones."""
    assert await operator.submit(make_tasks(2 * BATCH_TASKS + 1)) == 2 * BATCH_TASKS + 1
    sizes = [len(batch) for batch in system.scheduler.submitted]
    assert sizes == [BATCH_TASKS, BATCH_TASKS, 1]
    submitted = itertools.chain.from_iterable(system.scheduler.submitted)
    assert list(submitted) == [f"t{number}" for number in range(2 * BATCH_TASKS + 1)]


async def test_long_list_is_read_while_it_makes_progress(
    operator: Operator, system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a deadline on the whole, which grows with the queue."""
    monkeypatch.setattr(operator_module, "LIST_SILENCE_S", 0.1)
    operator._retry_for_s = 0.0
    system.scheduler.groups = [group("a", "code", common_pb2.GROUP_STATE_TRAINED, 1.0)]
    system.scheduler.stuck = True
    with pytest.raises(DeadlineExceeded, match=r"the scheduler sent nothing for 0\.1 s"):
        await operator.results("test")


def test_submission_calls_are_bounded_in_bytes() -> None:
    """Large payloads make small calls; a task larger than the bound is sent alone."""
    large = make_tasks(5, payload_bytes=BATCH_BYTES * 2 // 5)
    assert [len(batch) for batch in batches(large)] == [2, 2, 1]
    assert [len(batch) for batch in batches(make_tasks(2, payload_bytes=2 * BATCH_BYTES))] == [1, 1]
    assert list(batches([])) == []


async def test_results_are_mean_outcomes_per_domain(operator: Operator, system: System) -> None:
    """Only outcomes count; a failed rollout counts as 0, a running one does not count."""
    evaluated = common_pb2.GROUP_STATE_EVALUATED
    tombstoned = common_pb2.GROUP_STATE_TOMBSTONED
    system.scheduler.groups = [
        group("a", "sums", evaluated, 1.0, 0.0),
        group("b", "sums", tombstoned, 1.0, None),
        group("c", "code", evaluated, 0.25, 0.25, version=7),
        group("d", "code", common_pb2.GROUP_STATE_PENDING, 1.0),
    ]
    code, sums = await operator.results("test")
    assert (code.domain, code.rollouts, code.failed, code.mean_outcome) == ("code", 2, 0, 0.25)
    assert (sums.domain, sums.rollouts, sums.failed, sums.mean_outcome) == ("sums", 4, 1, 0.5)
    assert sums.task_outcomes == {"a": 0.5, "b": 0.5} and code.task_outcomes == {"c": 0.25}
    assert (code.solved, code.sampled_tokens) == (0, 20)
    assert (sums.solved, sums.sampled_tokens) == (2, 30)
    assert (code.min_weight_version, code.max_weight_version) == (7, 8)
    assert (sums.min_weight_version, sums.max_weight_version) == (3, 4)
    assert await operator.results("other") == []


async def test_tag_is_followed_until_all_its_groups_are_settled(
    operator: Operator, system: System
) -> None:
    """Each look is reported; tombstoned groups are settled too, without samples."""
    pending, tombstoned = common_pb2.GROUP_STATE_PENDING, common_pb2.GROUP_STATE_TOMBSTONED
    system.scheduler.groups = [group("a", "sums", pending), group("b", "sums", tombstoned)]
    seen: list[int] = []

    async def looked(done: int) -> None:
        seen.append(done)
        for each in system.scheduler.groups:
            each.group.state = tombstoned

    # A look takes half a second here: nine times as long it is left in peace, or for `poll_s`.
    paused_s: list[float] = []

    async def sleep(pause_s: float) -> None:
        paused_s.append(pause_s)

    clock = itertools.count(step=0.5).__next__
    (sums,) = await operator.all_ended(
        "test", groups=2, poll_s=2.0, on_look=looked, clock=clock, sleep=sleep
    )
    assert seen == [1, 2] and paused_s == [4.5]
    assert (sums.rollouts, sums.failed, sums.mean_outcome) == (4, 4, 0.0)
    assert (sums.min_weight_version, sums.max_weight_version) == (-1, -1)


async def test_outage_does_not_slow_the_polls_of_a_tag(operator: Operator, system: System) -> None:
    """The pause is nine times the successful poll, for any failover time before it."""
    pending, ended = common_pb2.GROUP_STATE_PENDING, common_pb2.GROUP_STATE_EVALUATED
    system.scheduler.groups = [group("a", "sums", pending, 1.0)]
    times_s = [0.0]
    system.scheduler.outages.append(lambda: times_s.append(3.0))
    paused_s: list[float] = []

    async def sleep(pause_s: float) -> None:
        paused_s.append(pause_s)
        system.scheduler.groups = [group("a", "sums", ended, 1.0)]

    await operator.all_ended("test", groups=1, poll_s=2.0, clock=lambda: times_s[-1], sleep=sleep)
    assert paused_s == [2.0]


async def test_step_tail_continues_after_a_trainer_restart(
    operator: Operator, system: System
) -> None:
    """From the step after the last one received."""
    steps = []
    async for metrics in operator.tail(after_step=3):
        steps.append(metrics.step)
        if len(steps) == 5:
            break
    assert steps == [4, 5, 6, 7, 8]
    assert system.trainer.asked == [3, 5, 7]


async def test_step_tail_ends_with_a_permanent_error(operator: Operator, system: System) -> None:
    """For example a refused token, once."""
    system.trainer.ending = grpc.StatusCode.PERMISSION_DENIED
    with pytest.raises(PermissionDenied):
        async for _ in operator.tail():
            pass
    assert system.trainer.asked == [0]
