"""A console over stand-ins of the services, on a real port, and its clients."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import aiohttp

from forge.cli.status.system_state import Service
from forge.client.operator import Operator
from forge.client.stored.pool import Page, PoolReader
from forge.client.stored.token_values import TurnValues
from forge.client.weights import WeightSteering
from forge.core.errors import ForgeError, NotFound, Unavailable
from forge.runtime.concurrency.tasks import cancel_and_wait
from forge.runtime.coordination import Coordinator, Instance
from forge.runtime.rpc.channel import Channels
from forge.runtime.security.credentials import Security
from forge.runtime.security.tokens import Claims, Keyring
from forge.v1 import common_pb2, pool_pb2, scheduler_pb2, trainer_pb2
from services.console.config import ConsoleConfig
from services.console.data.compared_runs import ComparedRuns
from services.console.data.queue_view import QueueView
from services.console.data.services_view import service_row
from services.console.data.steps import Steps
from services.console.data.tasks_view import TasksView
from services.console.data.topics import News, Poll, Topic
from services.console.data.trajectories.closes import Closes
from services.console.data.trajectories.token_texts import TokenTexts
from services.console.data.trajectories.token_values import TokenValuesCache
from services.console.data.trajectories.trajectory_cache import TrajectoryCache
from services.console.data.trajectories.trajectory_list import TrajectoryList
from services.console.data.weights_view import read_weights
from services.console.http.access import AccessRules
from services.console.http.actions import Actions
from services.console.http.events import Viewers
from services.console.http.server import DataSources, HttpServer
from tests.support.pool.records import make_reward

KEYRING = Keyring.from_bytes(b"k" * 32)
PERSONS = (
    *("SchedulerService", "PoolService", "InferenceService", "TrainerService", "DrainService"),
)


def token_of(scope: str, *, life_s: float = 3600.0, audience: tuple[str, ...] = PERSONS) -> str:
    """A token of `forge token issue`."""
    claims = Claims(
        subject=f"ada-{scope}",
        scopes=frozenset({scope}),
        token_id=scope,
        audience=frozenset(audience),
        expires_unix_s=time.time() + life_s,
    )
    return KEYRING.sign(claims)


class FakeOperator:
    """The scheduler's positions, and the trainer's steps."""

    def __init__(self) -> None:
        self.groups = {3: scheduler_pb2.QueuedGroup(queue_index=3, task_id="t", domain="code")}
        self.listed: list[scheduler_pb2.BatchGroup] = []
        self.reads = 0
        self.activity = scheduler_pb2.ACTIVITY_UNSPECIFIED
        self.drains: list[tuple[str, bool, str]] = []
        """Runner, drained, and the person."""
        self.steps: asyncio.Queue[trainer_pb2.StepMetrics] = asyncio.Queue()

    async def queue(self, **asked: Any) -> scheduler_pb2.GetQueueResponse:
        self.reads += 1
        index = asked.get("first_index") or 0
        return scheduler_pb2.GetQueueResponse(
            phases=bytes([scheduler_pb2.QUEUE_PHASE_TRAINED, scheduler_pb2.QUEUE_PHASE_RUNNING]),
            head=1,
            edge=2,
            next_index=2,
            groups=[self.groups[index]] if index in self.groups else [],
        )

    async def scheduler_status(self) -> scheduler_pb2.GetSchedulerStatusResponse:
        return scheduler_pb2.GetSchedulerStatusResponse(
            domains=[scheduler_pb2.DomainStatus(domain="code", share=1.0)]
        )

    async def newest_groups(
        self, tag: str, *, most: int
    ) -> tuple[list[scheduler_pb2.BatchGroup], bool]:
        found = [one for one in self.listed if tag in ("", one.group.task.tag)]
        return found[-most:], len(found) <= most

    async def set_activity(self, activity: scheduler_pb2.Activity.ValueType) -> None:
        self.activity = activity

    async def set_runner_draining(
        self, runner_id: str, draining: bool, *, on_behalf_of: str
    ) -> int:
        if runner_id != "runner-1":
            raise NotFound(f"runner {runner_id} is not in discovery")
        self.drains.append((runner_id, draining, on_behalf_of))
        return 0

    async def tail(self, after: int) -> AsyncIterator[trainer_pb2.StepMetrics]:
        while True:
            yield await self.steps.get()


class FakeSteering:
    """The trainer's hold."""

    def __init__(self) -> None:
        self.changes: list[tuple[Any, ...]] = []
        self.hold = trainer_pb2.WeightsHold()
        self.refusal = ""
        """The error of the next promotions."""

    async def listing(self) -> trainer_pb2.ListWeightsResponse:
        versions = [
            trainer_pb2.PublishedWeights(weight_version=1, trajectories=2, mean_reward=0.5),
            trainer_pb2.PublishedWeights(weight_version=2),
        ]
        workers = [trainer_pb2.WeightsWorker(instance_id="decode-1", role="both", weight_version=2)]
        return trainer_pb2.ListWeightsResponse(versions=versions, workers=workers, hold=self.hold)

    async def roll_back(self, version: int, *, on_behalf_of: str) -> None:
        if version > 2:
            raise NotFound(f"weight version {version} is not held")
        self.changes.append(("roll back", version, on_behalf_of))

    async def start_canary(self, version: int, *, share: float, on_behalf_of: str) -> None:
        self.changes.append(("canary", version, share, on_behalf_of))

    async def promote(self, *, on_behalf_of: str) -> None:
        if self.refusal:
            raise Unavailable(self.refusal)
        self.changes.append(("promote", on_behalf_of))


class FakePool:
    """Trajectories by id."""

    def __init__(self) -> None:
        self.stored: dict[str, common_pb2.Trajectory] = {}
        self.fetched: list[str] = []
        self.asked: list[pool_pb2.TrajectoryFilter] = []

    def put(self, trajectory_id: str, *turns: common_pb2.Turn, outcome: float = 1.0) -> None:
        """A sealed trajectory."""
        self.stored[trajectory_id] = common_pb2.Trajectory(
            trajectory_id=trajectory_id,
            task_id=trajectory_id.partition(":")[0],
            domain="code",
            state=common_pb2.TRAJECTORY_STATE_SEALED,
            turns=turns,
            rewards=[make_reward(value=outcome)],
            sealed_unix_s=float(len(self.stored) + 1),
        )

    def summary(self, one: common_pb2.Trajectory) -> common_pb2.TrajectorySummary:
        return common_pb2.TrajectorySummary(
            trajectory_id=one.trajectory_id,
            task_id=one.task_id,
            domain=one.domain,
            state=one.state,
            turns=len(one.turns),
            rewards=one.rewards,
            sealed_unix_s=one.sealed_unix_s,
        )

    async def find(self, trajectory_id: str) -> common_pb2.Trajectory:
        self.fetched.append(trajectory_id)
        if trajectory_id not in self.stored:
            raise NotFound(f"no pool shard has the turns of {trajectory_id}: unknown, or freed")
        return self.stored[trajectory_id]

    async def summaries(self, ids: Sequence[str]) -> list[common_pb2.TrajectorySummary]:
        return [self.summary(self.stored[each]) for each in ids if each in self.stored]

    async def query(
        self, wanted: pool_pb2.TrajectoryFilter, *, page_size: int
    ) -> AsyncIterator[Page]:
        asked = pool_pb2.TrajectoryFilter()
        asked.CopyFrom(wanted)
        self.asked.append(asked)
        found = [self.summary(one) for one in self.stored.values()]
        found = [one for one in found if one.sealed_unix_s >= wanted.closed_from_unix_s]
        for first in range(0, max(1, len(found)), page_size):
            yield Page(shard="0", trajectories=found[first : first + page_size])

    async def tail(self) -> AsyncIterator[pool_pb2.TailTrajectoriesResponse]:
        """No change."""
        await asyncio.Event().wait()
        yield pool_pb2.TailTrajectoriesResponse()

    async def shards(self) -> list[str]:
        return ["0"]

    async def stats(self, shard: str) -> pool_pb2.GetPoolStatsResponse:
        return pool_pb2.GetPoolStatsResponse(pool_shard=shard)

    async def search(
        self,
        wanted: pool_pb2.TrajectoryFilter,
        text: str,
        *,
        page_size: int,
        start: tuple[str, str],
    ) -> AsyncIterator[tuple[str, pool_pb2.SearchTrajectoriesResponse]]:
        """A page for each trajectory; its token is the id of the next one."""
        ids = sorted(self.stored)
        for at in range(ids.index(start[1]) if start[1] else 0, len(ids)):
            said = [turn.messages_json for turn in self.stored[ids[at]].turns]
            page = pool_pb2.SearchTrajectoriesResponse(
                next_page_token=ids[at + 1] if at + 1 < len(ids) else ""
            )
            for index, one in enumerate(said):
                if text in one and not page.matches:
                    page.matches.add(
                        trajectory=self.summary(self.stored[ids[at]]),
                        turn_index=index,
                        excerpt=one,
                    )
            yield "0", page


class FakeValues:
    """Token values of the trainer, by trajectory."""

    def __init__(self) -> None:
        self.stored: dict[str, dict[int, TurnValues]] = {}
        self.refusal: ForgeError | None = None
        """The error of the next reads."""
        self.reads = 0

    async def read(self, trajectory_id: str) -> dict[int, TurnValues]:
        self.reads += 1
        if self.refusal is not None:
            raise self.refusal
        if trajectory_id not in self.stored:
            raise NotFound(f"no token values of {trajectory_id} are stored")
        return self.stored[trajectory_id]


class Console:
    """One console and a client of it."""

    def __init__(self, config: ConsoleConfig) -> None:
        self.config = config
        self.operator = FakeOperator()
        self.pool = FakePool()
        self.steering = FakeSteering()
        self.values = FakeValues()
        self.instances: list[Instance] = []
        self.services: list[Service] = []
        self.security = Security(KEYRING, insecure=True)
        news = News()
        queue = QueueView(cast(Operator, self.operator))
        tasks = TasksView(cast(Operator, self.operator), cast(PoolReader, self.pool))
        self.topics: dict[str, Topic] = {
            "steps": Steps(news, self.operator.tail, most=config.max_steps),
            "queue": Poll("queue", news, queue.read, period_s=0.05, timeout_s=5.0),
            "weights": Poll(
                "weights",
                news,
                partial(read_weights, cast(WeightSteering, self.steering)),
                period_s=0.05,
                timeout_s=5.0,
            ),
            "closes": Closes(news, self.pool.tail),
            "tasks": Poll("tasks", news, tasks.read, period_s=0.05, timeout_s=5.0),
            "services": Poll("services", news, self._services, period_s=0.05, timeout_s=5.0),
            "overview": Poll("overview", news, _overview, period_s=0.05, timeout_s=5.0),
        }
        self.viewers = Viewers(self.topics, news, most=config.http.max_viewers)
        self.server = HttpServer(
            config,
            AccessRules(config, self.security),
            DataSources(
                viewers=self.viewers,
                queue=queue,
                trajectories=TrajectoryList(cast(PoolReader, self.pool)),
                tasks=tasks,
                cache=TrajectoryCache(self.pool.find, most_bytes=1 << 20),
                texts=TokenTexts(),
                values=TokenValuesCache(self.values.read),
                compared=ComparedRuns(config.compare, most=config.max_steps),
                actions=Actions(
                    cast(Operator, self.operator),
                    cast(WeightSteering, self.steering),
                    cast(Coordinator, SimpleNamespace(all_instances=self._all_instances)),
                    Channels(self.security),
                    timeout_s=30.0,
                ),
            ),
        )
        self.client: aiohttp.ClientSession
        self.port = 0

    @property
    def address(self) -> str:
        """URL of its pages, with a slash at the end."""
        return f"http://127.0.0.1:{self.port}/"

    async def _services(self) -> dict[str, Any]:
        rows = [service_row(one) for one in self.services]
        return {"services": rows, "missing": [], "problems": [], "shards": []}

    async def _all_instances(self) -> list[Instance]:
        return self.instances

    async def post(self, path: str, content: Any, **headers: str) -> tuple[int, Any]:
        """Status and JSON of an answer to a JSON body."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self.client.post(path, json=content, headers=named) as response:
            return response.status, await response.json(content_type=None)

    async def get(self, path: str, **headers: str) -> tuple[int, Any]:
        """Status and JSON of an answer."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self.client.get(path, headers=named) as response:
            return response.status, await response.json(content_type=None)

    async def events(self, response: aiohttp.ClientResponse) -> AsyncIterator[tuple[str, Any]]:
        """Topic and content of each event."""
        name = ""
        async for line in response.content:
            kind, _, value = line.decode().rstrip("\n").partition(": ")
            if kind == "event":
                name = value
            elif kind == "data":
                yield name, json.loads(value)


async def _overview() -> dict[str, Any]:
    return {"cluster": "default", "errors": {}, "campaign": {}}


@asynccontextmanager
async def served(config: ConsoleConfig | None = None) -> AsyncIterator[Console]:
    """A console that serves during a block."""
    console = Console(config or ConsoleConfig())
    console.port = await console.server.start(None)
    tasks = [asyncio.create_task(topic.run()) for topic in console.topics.values()]
    # Cookies of an IP address, too.
    jar = aiohttp.CookieJar(unsafe=True)
    try:
        async with aiohttp.ClientSession(
            f"http://127.0.0.1:{console.port}", cookie_jar=jar
        ) as console.client:
            yield console
    finally:
        await cancel_and_wait(*tasks)
        await console.server.stop()


def write_metrics(run: Path, steps: int) -> Path:
    """A run directory with so many steps."""
    run.mkdir()
    lines = []
    for step in range(1, steps + 1):
        names = ("mean_reward", "entropy", "staleness_mean", "logprob_gap_mean")
        values = dict.fromkeys((*names, "merge_ratio", "step_s", "wait_s"), 0.0)
        lines.append(json.dumps(values | {"step": step, "mean_reward": step / 10, "domains": {}}))
    (run / "metrics.jsonl").write_text("\n".join(lines))
    return run
