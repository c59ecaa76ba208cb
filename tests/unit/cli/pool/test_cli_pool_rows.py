"""Lists of trajectories: the rows up to a limit, and a line if there are more."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from forge.cli.pool import pool_reading
from forge.client.stored.pool import Page
from forge.v1 import common_pb2, pool_pb2


class TwoTrajectories:
    def __init__(self, *_: object) -> None: ...

    async def query(self, *_: object, **__: object) -> AsyncIterator[Page]:
        found = [common_pb2.TrajectorySummary(trajectory_id=f"a:{rollout}:0") for rollout in (0, 1)]
        yield Page(shard="s0", trajectories=found, damaged=[])


@asynccontextmanager
async def opened() -> AsyncIterator[tuple[None, None]]:
    yield None, None


@pytest.mark.parametrize("as_json", [False, True])
async def test_list_says_on_stderr_that_there_are_more_rows(
    as_json: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A program that reads the rows must not take a part of them for all."""
    monkeypatch.setattr(pool_reading, "PoolReader", TwoTrajectories)
    at: Any = SimpleNamespace(open=opened)
    wanted = pool_pb2.TrajectoryFilter()
    await pool_reading.list_trajectories(at, wanted, limit=1, as_json=as_json)
    output, errors = capsys.readouterr()
    assert errors == "There are more than these 1: see --limit.\n"
    if as_json:
        assert [json.loads(line)["trajectory_id"] for line in output.splitlines()] == ["a:0:0"]
    await pool_reading.list_trajectories(at, wanted, limit=0, as_json=as_json)
    assert capsys.readouterr().err == ""
