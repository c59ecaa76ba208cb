"""Sessions of a test at the gateway of a running `forge run`, which keep each answer.

A lost request is an error: the sessions repeat no call.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random

from forge.cli.connection import of_run
from forge.client.sessions.session import AgentSession
from forge.client.sessions.turns import Sampled
from forge.core.trajectory import parse_trajectory_id
from forge.runtime.security.tokens import Claims, Keyring
from tests.support.suite.forge_run import LIMIT_S, ForgeRun

SESSIONS = 3
"""That talk at the same time."""
TURNS = 3
SHARED_TOKENS, OWN_TOKENS, MOST_TOKENS = 96, 48, 32
"""Of a session's first prompt, common to all and its own; of each answer."""
_LEAST_ID, _BEYOND_ID = 16, 256
"""Range of the drawn ids: part of any vocabulary here."""


@dataclass(kw_only=True)
class Probes:
    """The sessions so far."""

    keyring: Keyring
    gateway: str
    shard: str
    answers: dict[str, list[Sampled]] = field(default_factory=dict)
    """By trajectory; each was answered at its first call."""
    sealed: set[str] = field(default_factory=set)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    async def converse(self, stop: asyncio.Event) -> None:
        """Open session after session."""
        while not stop.is_set():
            await self._session(next(self._numbers))

    async def _session(self, number: int) -> None:
        name = f"probe-{number}:0:0"
        token = self.keyring.sign(
            Claims(
                subject=name,
                scopes=frozenset({"session"}),
                trajectory_id=name,
                task_id=parse_trajectory_id(name).task_id,
                domain="probes",
                pool_shard=self.shard,
            )
        )
        ids = [*_drawn(0, SHARED_TOKENS), *_drawn(number + 1, OWN_TOKENS)]
        async with AgentSession.connect(self.gateway, token, retry_for_s=0.0) as session:
            for _ in range(TURNS):
                sampled = await session.generate(ids, max_tokens=MOST_TOKENS)
                self.answers.setdefault(name, []).append(sampled)
                ids = [*ids, *sampled.ids, *_drawn(len(ids), 8)]
        self.sealed.add(name)

    @property
    def turns(self) -> int:
        """Answered calls."""
        return sum(map(len, self.answers.values()))


def _drawn(seed: int, count: int) -> Sequence[int]:
    draw = Random(seed)
    return [draw.randrange(_LEAST_ID, _BEYOND_ID) for _ in range(count)]


@asynccontextmanager
async def probing(run: ForgeRun) -> AsyncIterator[Probes]:
    """Sessions at a running run, until the end of the block; raises the error of a lost request."""
    async with of_run(run.directory).open() as (coordinator, _):
        (gateway,) = await coordinator.discover("gateway").wait(timeout_s=LIMIT_S)
        (pool,) = await coordinator.discover("pool").wait(timeout_s=LIMIT_S)
        probes = Probes(
            keyring=Keyring.from_file(run.directory / "key"),
            gateway=gateway.address,
            shard=pool.metadata["shard"],
        )
        stop = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            for _ in range(SESSIONS):
                group.create_task(probes.converse(stop))
            yield probes
            stop.set()
