"""A console over stand-ins of the services, on a real port, and its clients."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import aiohttp

from forge.client.operator import Operator
from forge.runtime.concurrency.tasks import cancel_and_wait
from forge.runtime.security.credentials import Security
from forge.runtime.security.tokens import Claims, Keyring
from forge.v1 import scheduler_pb2, trainer_pb2
from services.console.config import ConsoleConfig
from services.console.data.queue_view import QueueView
from services.console.data.steps import Steps
from services.console.data.topics import News, Poll, Topic
from services.console.http.access import Access
from services.console.http.events import Viewers
from services.console.http.server import HttpServer, Sources

KEYRING = Keyring.from_bytes(b"k" * 32)
PERSONS = ("SchedulerService", "PoolService", "InferenceService", "TrainerService")


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
        self.reads = 0
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

    async def tail(self, after: int) -> AsyncIterator[trainer_pb2.StepMetrics]:
        while True:
            yield await self.steps.get()


class Console:
    """One console and a client of it."""

    def __init__(self, config: ConsoleConfig) -> None:
        self.config = config
        self.operator = FakeOperator()
        self.security = Security(KEYRING, insecure=True)
        news = News()
        queue = QueueView(cast(Operator, self.operator))
        self.topics: dict[str, Topic] = {
            "steps": Steps(news, self.operator.tail, most=config.max_steps),
            "queue": Poll("queue", news, queue.read, period_s=0.05, timeout_s=5.0),
        }
        self.viewers = Viewers(self.topics, news, most=config.http.max_viewers)
        self.server = HttpServer(
            config,
            Access(config, self.security),
            Sources(viewers=self.viewers, queue=queue),
        )
        self.client: aiohttp.ClientSession
        self.port = 0

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
