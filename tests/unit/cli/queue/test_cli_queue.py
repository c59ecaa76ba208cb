"""`forge queue`, before a scheduler that says what a test wants."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from forge.cli.connection import Connection
from forge.cli.queue import command as queue
from forge.cli.queue import runner_drain
from forge.client import operator
from forge.v1 import scheduler_pb2

DRAINING = scheduler_pb2.ACTIVITY_DRAINING


async def test_drain_waits_for_groups_unknown_to_a_new_leader(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A new leader knows no running group before the runners have renewed their leases."""
    looks = [
        scheduler_pb2.GetSchedulerStatusResponse(activity=DRAINING, mode="fifo", **found)
        for found in (
            {"running_groups": 2},
            {"taking_over": True},
            {"running_groups": 2},
            {"trained": 7},
        )
    ]

    class Operator:
        def __init__(self, *_: Any) -> None: ...

        async def set_activity(self, activity: int) -> None:
            assert activity == DRAINING

        async def scheduler_status(self) -> scheduler_pb2.GetSchedulerStatusResponse:
            return looks.pop(0)

    class Unconnected(Connection):
        @asynccontextmanager
        async def open(self, *_: Any, **__: Any) -> AsyncIterator[tuple[Any, Any]]:
            yield None, None

    monkeypatch.setattr(operator, "Operator", Operator)
    monkeypatch.setattr(queue, "_POLL_S", 0.0)
    await queue._set(Unconnected(etcd="", cluster=""), "ACTIVITY_DRAINING", wait=True)
    assert not looks
    assert "7 trained" in capsys.readouterr().out


async def test_drain_of_a_runner_waits_for_rollouts_unknown_to_a_new_leader(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only a leader that knows the leases of runners can say that none is left."""
    drained = scheduler_pb2.DrainingRunner(runner_id="r", start_id="1", running=2)
    looks = [
        scheduler_pb2.GetSchedulerStatusResponse(draining_runners=[drained]),
        scheduler_pb2.GetSchedulerStatusResponse(taking_over=True),
        scheduler_pb2.GetSchedulerStatusResponse(draining_runners=[drained]),
        scheduler_pb2.GetSchedulerStatusResponse(),
    ]

    class Scheduler:
        async def set_runner_draining(
            self, runner_id: str, draining: bool, *, on_behalf_of: str
        ) -> int:
            assert (runner_id, draining) == ("r", True) and on_behalf_of
            return 2

        async def scheduler_status(self) -> scheduler_pb2.GetSchedulerStatusResponse:
            return looks.pop(0)

    monkeypatch.setattr(runner_drain, "_PAUSE_S", 0.0)
    scheduler = cast(operator.Operator, Scheduler())
    assert await runner_drain.drain_runner(scheduler, "r", resume=False, wait_s=60.0) == 0
    assert not looks
    looks.append(scheduler_pb2.GetSchedulerStatusResponse(taking_over=True))
    left = await runner_drain.drain_runner(scheduler, "r", resume=False, wait_s=0.0)
    assert left is None and "does not know" in runner_drain.report("r", left, resume=False)
