"""Agents in a closed loop: each sends its next request when it has the answer to the last.

Owns the load and what is counted of it. The clients are as light as can be, since they share the
machine with what is measured: bodies are spliced, not serialized, and answers are not parsed.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random

from aiohttp import ClientSession, ClientTimeout

SYSTEM = "You are a careful agent. Look things up in the table before you answer. " * 6
QUESTION = "What does the table say about the quick brown fox, and what about the lazy dog? "


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Something that answers chat completions."""

    name: str
    url: str
    key: Callable[[], str]
    """An API key for one more session."""
    pid: int
    """0 where its cost is of no interest."""


@dataclass(slots=True, kw_only=True)
class Load:
    """Result of a run."""

    latencies_s: list[float] = field(default_factory=list)
    firsts_s: list[float] = field(default_factory=list)
    """From each request to the first bytes of its answer."""
    elapsed_s: float = 0.0
    cpu_s: float = 0.0

    @property
    def per_cpu_s(self) -> float:
        return len(self.latencies_s) / self.cpu_s

    @property
    def per_s(self) -> float:
        return len(self.latencies_s) / self.elapsed_s


class Agent:
    """One session: a history that grows by a question and an answer per turn."""

    def __init__(
        self, target: Target, answer: str, *, question: str = QUESTION, max_tokens: int = 1000
    ) -> None:
        self._url = target.url
        self._headers = {
            "Authorization": f"Bearer {target.key()}",
            "Content-Type": "application/json",
        }
        self._question = _spelled("user", question)
        self._answer = _spelled("assistant", answer)
        self._messages = [_spelled("system", SYSTEM)]
        self.last_body = b""
        self.first_s = 0.0
        """From the last request to the first bytes of its answer."""
        settings = {"model": "policy", "stream": True, "max_tokens": max_tokens}
        self._head = json.dumps(settings)[:-1].encode() + b', "messages": ['

    def next_body(self) -> bytes:
        """The next request; the answer to it counts as given."""
        self._messages.append(self._question)
        body = self._head + b", ".join(self._messages) + b"]}"
        self._messages.append(self._answer)
        return body

    async def turn(self, client: ClientSession) -> float:
        """Seconds from the request to the end of its answer."""
        body = self.last_body = self.next_body()
        started_s = time.perf_counter()
        async with client.post(self._url, data=body, headers=self._headers) as response:
            first = await response.content.readany()
            self.first_s = time.perf_counter() - started_s
            answer = first + await response.content.read()
        elapsed_s = time.perf_counter() - started_s
        if response.status != 200 or not answer.rstrip().endswith(b"[DONE]"):
            raise RuntimeError(f"{self._url} answered {response.status}: {answer[:500]!r}")
        return elapsed_s


def new_client() -> ClientSession:
    return ClientSession(timeout=ClientTimeout(total=120))


async def drive(
    agents: Iterator[Agent],
    *,
    turns: int,
    concurrency: int,
    for_s: float = 1e9,
    at_least: int = 0,
    begin_within_s: float = 0.0,
) -> Load:
    """Runs sessions of so many turns until there are no more, or until time is up and at least
    so many requests were answered, however slow the machine is. The first requests come at random
    within `begin_within_s`: answers that all take the same time would else come in step forever.
    """
    load = Load()
    started_s = time.perf_counter()

    def over() -> bool:
        late = time.perf_counter() - started_s > for_s
        return late and len(load.latencies_s) >= at_least

    async def work(client: ClientSession, begin_s: float) -> None:
        await asyncio.sleep(begin_s)
        while True:
            agent = next(agents, None)
            if agent is None:
                return
            for _ in range(turns):
                if over():
                    return
                load.latencies_s.append(await agent.turn(client))
                load.firsts_s.append(agent.first_s)

    async with new_client() as client, asyncio.TaskGroup() as group:
        random = Random(concurrency)
        for _ in range(concurrency):
            group.create_task(work(client, random.uniform(0.0, begin_within_s)))
    load.elapsed_s = time.perf_counter() - started_s
    return load


def _spelled(role: str, content: str) -> bytes:
    return json.dumps({"role": role, "content": content}).encode()
