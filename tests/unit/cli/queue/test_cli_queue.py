"""`forge queue`, before a scheduler that says what a test wants."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from forge.cli.connection import Connection
from forge.cli.queue import command as queue
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
