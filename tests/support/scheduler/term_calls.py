"""Calls of clients to the actors of one term."""

from __future__ import annotations

from typing import Any

from forge.core.placement.sharding import choose_shard
from forge.v1 import common_pb2
from services.scheduler.state.messages.groups import Submit
from services.scheduler.state.messages.rollouts import LeaseRollouts
from services.scheduler.state.messages.term import GetStatus
from tests.support.scheduler.term import ASK_S, TermActors


def name_on(shard: str, prefix: str = "task") -> str:
    """A task id that is placed on `shard`, of s0 and s1."""
    names = (f"{prefix}-{number}" for number in range(100))
    return next(name for name in names if choose_shard(name, {"s0", "s1"}) == shard)


async def submit(term: TermActors, *tasks: common_pb2.Task) -> int:
    submitted = Submit(tasks={task.task_id: task for task in tasks})
    return int(await term.submissions.ask(submitted, timeout_s=ASK_S))


async def lease(term: TermActors, count: int = 10) -> list[str]:
    """Trajectory ids; none if there is nothing now."""
    ask = LeaseRollouts(runner_id="r", max_rollouts=count)
    future = await term.queue.ask(ask, timeout_s=ASK_S)
    if not future.done():
        future.cancel()
        return []
    return [grant.trajectory_id for grant in future.result()]


async def status(term: TermActors) -> Any:
    return await term.queue.ask(GetStatus(), timeout_s=ASK_S)
