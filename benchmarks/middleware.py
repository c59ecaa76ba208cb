"""The way of a trajectory, without a model: `python -m benchmarks.middleware [--quick]`.

Real processes on loopback: gateway, pool, scheduler and etcd, with a mock upstream that answers 32
tokens at once in the place of inference. Agents lease rollouts, make 4 streamed calls over HTTP
and close the session with a reward; a trainer takes batches, fetches every trajectory and commits.
A trajectory counts once it is committed. What the agents, the trainer and the upstream cost is not
counted as the middleware's, but they share the machine with it: so CPU seconds are the measure,
and trajectories per second on two cores is what those allow, beside what the run itself reached.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import uvloop
from aiohttp import ClientSession

from benchmarks.support.gateway.chat_load import Agent, Target, new_client
from benchmarks.support.gateway.middleware_stack import Middleware, start_middleware
from benchmarks.support.report import arguments, keep, show
from forge.agents.rollout import RolloutResult
from forge.agents.runner import Runner
from forge.client.scheduler import SyncScheduler
from forge.core.token_columns import TOKEN_BYTES
from forge.runtime.security.credentials import Security
from forge.v1 import common_pb2, pool_pb2, scheduler_pb2
from tests.support.scheduler.cluster import CALL_S, ids_of, make_task

TURNS = 4
GROUP_SIZE = 8
AGENTS = 32
"""Rollouts at work at once."""
CONCURRENCY = 64
"""N, in groups."""
BATCH_GROUPS = 8
CORES = 2
MILLION_A_DAY = 1e6 / 86_400
"""Trajectories per second."""
REWARD = b'{"rewards": [{"name": "right", "kind": "outcome", "value": 1.0}], "min_turns": 4}'


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    rounds: int
    groups: int
    """Groups of a round; a multiple of `BATCH_GROUPS`."""


FULL = Size(rounds=5, groups=64)
QUICK = Size(rounds=2, groups=24)


async def measure(size: Size) -> dict[str, float]:
    """Medians over rounds; what is spent before the first round is nobody's."""
    with tempfile.TemporaryDirectory() as folder:
        async with start_middleware(
            Path(folder), concurrency=CONCURRENCY, batch_groups=BATCH_GROUPS
        ) as middleware:
            with closing(Load(middleware)) as load:
                await load.round(BATCH_GROUPS)
                rounds = [await load.round(size.groups) for _ in range(size.rounds)]
    numbers = {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}
    spent_s = numbers["cpu_ms_per_trajectory"] / 1e3
    numbers["trajectories_per_s_of_two_cores"] = CORES / spent_s
    numbers["head_room_over_a_million_a_day"] = CORES / spent_s / MILLION_A_DAY
    return numbers


class Load:
    """Everyone around the middleware: who submits, the runner with its agents, the trainer."""

    def __init__(self, middleware: Middleware) -> None:
        self._middleware = middleware
        self._cluster = middleware.cluster
        security = Security(self._cluster.keyring, subject="runner")
        self._renewals = SyncScheduler(self._cluster.coordinator, security)
        self._names = itertools.count()
        self._steps = itertools.count(1)

    def close(self) -> None:
        self._renewals.close()

    async def round(self, groups: int) -> dict[str, float]:
        """So many groups, from their submission to the commit of the last."""
        tasks = [make_task(f"m-{next(self._names)}", size=GROUP_SIZE) for _ in range(groups)]
        before_s, own_s, started_s = self._middleware.cpu_s(), time.process_time(), time.time()
        await self._cluster.submit(tasks)
        async with new_client() as client, asyncio.TaskGroup() as parts:
            runner = Runner(
                identity=lambda: scheduler_pb2.LeaseRolloutsRequest(runner_id="runner"),
                scheduler=self._ask_scheduler,
                renew=self._renew,
                attempt=partial(self._rollout, client),
                concurrency=AGENTS,
                lease_wait_s=0.5,
                patience_s=CALL_S,
            )
            parts.create_task(runner.run())
            count = await self._train(groups)
            await runner.drain(patience_s=10)
        elapsed_s, after_s = time.time() - started_s, self._middleware.cpu_s()
        spent_ms = {
            name: 1e3 * (after_s[name] - before_s[name]) / count for name in self._middleware.pids
        }
        return {
            "trajectories_per_s": count / elapsed_s,
            "cpu_ms_per_trajectory": sum(spent_ms.values()),
            **{f"{name}_cpu_ms": value for name, value in spent_ms.items()},
            "load_cpu_ms": 1e3 * (time.process_time() - own_s) / count,
        }

    async def _rollout(
        self, client: ClientSession, lease: scheduler_pb2.RolloutLease
    ) -> RolloutResult:
        """An agent's work: calls, each with the whole history, and a close with the reward."""
        token = lease.session_token
        target = Target(name="forge", url=self._middleware.chat_url, key=lambda: token, pid=0)
        agent = Agent(target, self._middleware.answer)
        for _ in range(TURNS):
            await agent.turn(client)
        headers = {"Authorization": f"Bearer {lease.grader_token}"}
        url = self._middleware.close_url
        async with client.post(url, data=REWARD, headers=headers) as response:
            if response.status != 200:
                raise RuntimeError(f"{url} answered {response.status}: {await response.text()}")
        return RolloutResult(lease_id=lease.lease_id, trajectory_id=lease.trajectory_id)

    async def _train(self, groups: int) -> int:
        """Take, fetch and commit until all are trained; how many trajectories that were."""
        trained = 0
        while groups:
            batch = await self._cluster.take(trainer="trainer")
            if not batch.batch_id:
                continue
            ids = [one.trajectory_id for group in batch.groups for one in group.trajectories]
            trained += await self._fetch(ids)
            await self._cluster.commit(batch, next(self._steps))
            groups -= len(ids_of(batch))
        return trained

    async def _fetch(self, trajectory_ids: list[str]) -> int:
        """Reads all of them, whole; how many there are."""
        picked = await self._middleware.pools.pick()
        stub: Any = picked[1]
        request = pool_pb2.FetchTrajectoriesRequest(trajectory_ids=trajectory_ids)
        complete = 0
        async for response in stub.FetchTrajectories(request, timeout=60):
            chunk = response.trajectory
            if not chunk.last:
                raise RuntimeError(f"{response.trajectory_id} is longer than a chunk")
            _check(common_pb2.Trajectory.FromString(chunk.data))
            complete += 1
        return complete

    async def _ask_scheduler(self, method: str, request: Any, *, timeout_s: float) -> Any:
        async with asyncio.timeout(timeout_s):
            return await self._cluster.ask(method, request)

    def _renew(self, lease_ids: Sequence[str]) -> Sequence[str]:
        request = scheduler_pb2.RenewRolloutsRequest(lease_ids=lease_ids)
        lost: Sequence[str] = self._renewals.call("RenewRollouts", request, timeout_s=CALL_S).lost
        return lost


def _check(trajectory: common_pb2.Trajectory) -> None:
    """Raises RuntimeError unless each turn goes on where the one before it ended."""
    if len(trajectory.turns) != TURNS:
        raise RuntimeError(f"{trajectory.trajectory_id} has {len(trajectory.turns)} turns")
    end = 0
    for turn in trajectory.turns:
        if turn.prefix_tokens != end or not turn.sampled.ids:
            raise RuntimeError(
                f"turn {turn.turn_index} of {trajectory.trajectory_id} begins with "
                f"{turn.prefix_tokens} tokens of the {end} before it"
            )
        end += (len(turn.prompt_ids) + len(turn.sampled.ids)) // TOKEN_BYTES


def main() -> None:
    options = arguments(__doc__, quick="fewer and shorter rounds").parse_args()
    size = QUICK if options.quick else FULL
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        numbers = runner.run(measure(size))
    show("Middleware", numbers)
    keep(numbers, options.json)


if __name__ == "__main__":
    main()
