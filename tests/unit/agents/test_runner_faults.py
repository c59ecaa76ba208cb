"""Whose failure it was that an attempt was not sealed, as its runner reports it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest
import pytest_asyncio

from forge.agents.sandbox.own_time import OutOfTime, most_to_run, within
from forge.core.errors import FailedPrecondition, ResourceExhausted, Unavailable
from forge.core.queue.dispatch.failures import FailureKind, kind_of_abandoned
from forge.runtime.concurrency import tasks
from forge.v1 import scheduler_pb2 as pb
from tests.support.agents.attempt_bench import Bench, started_bench
from tests.support.agents.scripted_gateway import Message, text
from tests.support.agents.tasks import SumDomain, lease

TASK, INFRASTRUCTURE = pb.FAILURE_KIND_TASK, pb.FAILURE_KIND_INFRASTRUCTURE


@pytest_asyncio.fixture
async def bench() -> AsyncIterator[Bench]:
    async with started_bench() as made:
        yield made


class Crashing(SumDomain):
    """A domain whose own code fails."""

    def episode(self, payload: Any) -> Any:
        raise ZeroDivisionError("division by zero")


async def test_crashed_agent_is_a_failure_of_the_task(bench: Bench) -> None:
    """Its calls were answered: the attempt counts."""
    outcome = await bench.run(lease(), domain=Crashing())
    assert outcome.kind == TASK
    assert kind_of_abandoned(bench.session().reason) is FailureKind.TASK


async def test_agent_that_crashes_after_a_failed_call_is_an_infrastructure_failure(
    bench: Bench,
) -> None:
    """The program ended because its model call failed."""
    bench.gateway.unanswered = "no router is there"
    outcome = await bench.run(lease(), domain=Crashing())
    assert outcome.kind == INFRASTRUCTURE
    assert "its last model call got no answer: no router is there" in outcome.error
    assert kind_of_abandoned(bench.session().reason) is FailureKind.INFRASTRUCTURE


async def test_agent_that_crashes_with_its_gateway_gone_is_an_infrastructure_failure(
    bench: Bench,
) -> None:
    """It is unknown whether its calls were answered."""
    bench.gateway.failures = [(grpc.StatusCode.UNAVAILABLE, "gone")]
    outcome = await bench.run(lease(), domain=Crashing())
    assert outcome.kind == INFRASTRUCTURE


@pytest.mark.parametrize("error", [Unavailable("no router"), ResourceExhausted("the disk is full")])
async def test_failed_model_call_is_an_infrastructure_failure(
    bench: Bench, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However the agent handles it."""
    monkeypatch.setattr("openai._base_client.MAX_RETRY_DELAY", 0.0)

    async def refuse(token: str, messages: list[Message]) -> Message:
        bench.gateway.unanswered = str(error)
        raise error

    bench.gateway.script = refuse
    assert (await bench.run(lease())).kind == INFRASTRUCTURE


async def test_turns_lost_with_a_gateway_are_an_infrastructure_failure(bench: Bench) -> None:
    """The agent had got an answer to each."""

    async def forgetful(token: str, messages: list[Message]) -> Message:
        bench.session().requests.clear()
        return text("4")

    bench.gateway.script = forgetful
    assert (await bench.run(lease())).kind == INFRASTRUCTURE


async def test_stopped_rollout_is_abandoned_as_an_infrastructure_failure(bench: Bench) -> None:
    """The next leader does not count it either."""
    await bench.stopped(lease())
    assert kind_of_abandoned(bench.session().reason) is FailureKind.INFRASTRUCTURE


async def test_failed_reward_function_is_a_failure_of_the_task(bench: Bench) -> None:
    """It would fail again."""
    outcome = await bench.run(lease(), reward="hangs", reward_s=0.1)
    assert outcome.kind == TASK


async def test_process_killed_by_the_host_is_an_infrastructure_failure(bench: Bench) -> None:
    """A host without memory says nothing about the task."""
    outcome = await bench.run(lease(), reward="killed")
    assert outcome.kind == INFRASTRUCTURE
    assert "killed by SIGKILL" in outcome.error


class Time:
    """A clock that advances by the length of each wait, and work that ends at a given time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        self.held_up_s = 0.0
        """By so much later than it was to end, each wait ends."""
        self._wait = asyncio.wait
        monkeypatch.setattr(asyncio, "wait", self._pass)

    def __call__(self) -> float:
        return self.now_s

    async def _pass(self, tasks: Any, *, timeout: float | None = None) -> Any:
        # The end of cancelled work takes no time.
        if not any(task.cancelling() for task in tasks):
            self.now_s += (timeout or 0.0) + self.held_up_s
        return await self._wait(tasks, timeout=None if timeout is None else 0.0)

    async def limit(self, *, crowding: float = 1.0, waited_s: Callable[[], float]) -> float:
        """The time at which endless work is cancelled, with a limit of 100 s."""

        async def waited() -> float:
            return waited_s()

        with pytest.raises(OutOfTime):
            await within(
                100.0,
                asyncio.Event().wait(),
                waited_s=waited,
                crowding=lambda: crowding,
                clock=self,
            )
        return self.now_s


async def test_own_time_excludes_waits_for_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """After 300 s of waiting the limit is 300 s later."""
    time = Time(monkeypatch)
    ended_s = await time.limit(waited_s=lambda: min(300.0, time.now_s * 0.9))
    assert 400.0 <= ended_s <= 406.0


async def test_own_time_counts_less_on_an_overloaded_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """With eight programs for each core, an agent gets eight times as long."""
    ended_s = await Time(monkeypatch).limit(crowding=8.0, waited_s=lambda: 0.0)
    assert 800.0 <= ended_s <= 806.0


async def test_own_time_excludes_pauses_of_the_runner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its host stopped it, or another agent blocked its event loop, for 300 s at a time: 20 looks
    of 5 s are needed, of 6 s where the first second of each delay counts."""
    time = Time(monkeypatch)
    time.held_up_s = 300.0
    assert await time.limit(waited_s=lambda: 0.0) >= 100.0 / 6 * 300.0


@pytest.mark.parametrize(
    ("loadavg", "expected"),
    [
        ("8.00 2.00 1.00 3/151 27542\n", 8.0),  # a minute of load
        ("0.50 0.10 0.00 17/151 27542\n", 16.0),  # the load has just begun
        ("0.00 0.00 0.00 1/151 27542\n", 0.0),
    ],
)
def test_own_time_follows_a_new_load_at_once(loadavg: str, expected: float) -> None:
    """The average of a minute is too late for a limit of seconds."""
    assert most_to_run(loadavg) == expected


async def test_own_time_on_an_idle_host_is_elapsed_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit is a limit."""
    assert await Time(monkeypatch).limit(waited_s=lambda: 0.0) == 100.0


async def test_limited_work_returns_its_result_or_error() -> None:
    """Through `within`."""

    async def good() -> int:
        return 4

    async def bad() -> int:
        raise FailedPrecondition("no")

    assert await within(60.0, good()) == 4
    with pytest.raises(FailedPrecondition):
        await within(60.0, bad())


async def test_limited_work_is_cancelled_with_its_caller() -> None:
    """It has ended when the caller continues."""
    ended = asyncio.Event()
    began = asyncio.Event()

    async def work() -> None:
        try:
            began.set()
            await asyncio.Event().wait()
        finally:
            ended.set()

    caller = asyncio.create_task(within(60.0, work()))
    await began.wait()
    caller.cancel()
    await asyncio.wait([caller])
    assert caller.cancelled() and ended.is_set()


async def test_limited_work_frees_its_resources(monkeypatch: pytest.MonkeyPatch) -> None:
    """The removal of a container may take seconds; it is not cancelled as well."""
    monkeypatch.setattr(tasks, "_REPEAT_S", 0.01)
    removed = False

    async def work() -> None:
        nonlocal removed
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.1)
            removed = True

    with pytest.raises(OutOfTime):
        await within(0.01, work())
    assert removed
