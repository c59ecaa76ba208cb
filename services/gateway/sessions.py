"""All sessions of this gateway: found by token, made on first use, dropped when idle.

Owns the life of session actors and shard writers, and how many calls may be in flight. A session
leaves memory only when nobody uses it and all its turns are durable; the next call with its token
reads it back from the pool.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from forge.core.errors import PermissionDenied, ResourceExhausted, Unavailable
from forge.core.trajectory import parse_trajectory_id
from forge.runtime.actor import ActorRef, ActorSystem
from forge.runtime.security import Claims
from forge.v1 import common_pb2
from services.gateway.actors.session import SessionActor, SessionSettings
from services.gateway.actors.shard_writer import Append, Backlog, Flush, OpenStream, ShardWriter
from services.gateway.metrics import CALLS, SESSIONS

FLUSH_TIMEOUT_S = 60.0
"""For the turns of one session to become durable."""


@dataclass(slots=True, kw_only=True)
class Session:
    """A session in memory, as its callers hold it."""

    claims: Claims
    actor: ActorRef
    backlog: Backlog
    writer: ActorRef
    users: int = 0
    used_s: float = 0.0
    """When it was last in use."""

    @property
    def idle(self) -> bool:
        """Whether it can be dropped without losing anything."""
        return not self.users and not self.backlog.by_trajectory[self.claims.trajectory_id]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds on what is kept and done at once."""

    sessions: int
    calls: int
    idle_s: float
    backlog_bytes: int


class Sessions:
    def __init__(
        self,
        actors: ActorSystem,
        *,
        limits: Limits,
        settings: Callable[[Backlog, ActorRef], SessionSettings],
        open_stream: Callable[[str], OpenStream],
        clock: Callable[[], float],
    ) -> None:
        self._actors = actors
        self._limits = limits
        self._settings = settings
        self._open_stream = open_stream
        self._clock = clock
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        """The longest unused first."""
        self._writers: dict[str, tuple[Backlog, ActorRef]] = {}
        self._making = asyncio.Lock()
        self._calls = 0
        self._draining = False
        self._quiet = asyncio.Event()
        """Set whenever no call is in flight."""

    @asynccontextmanager
    async def use(self, claims: Claims) -> AsyncIterator[Session]:
        """The session of a verified token, kept in memory meanwhile."""
        session = self._sessions.get(claims.trajectory_id)
        if session is None or not session.actor.alive:
            # One at a time: two first calls must find one session.
            async with self._making:
                session = self._sessions.get(claims.trajectory_id)
                if session is None or not session.actor.alive:
                    session = await self._make(claims)
        session.users += 1
        try:
            yield session
        finally:
            session.users -= 1
            session.used_s = self._clock()
            if claims.trajectory_id in self._sessions:
                self._sessions.move_to_end(claims.trajectory_id)

    @asynccontextmanager
    async def call(self, session: Session) -> AsyncIterator[None]:
        """One sampling call. Raises `ResourceExhausted` when there are too many, or when too many
        turns wait for the disk; `Unavailable` while draining."""
        if self._draining:
            raise Unavailable("this gateway is draining", retry_after_s=0.0)
        if self._calls >= self._limits.calls:
            raise ResourceExhausted(
                f"{self._calls} calls are in flight, the most there may be", retry_after_s=1.0
            )
        session.backlog.admit()
        self._calls += 1
        self._quiet.clear()
        CALLS.set(self._calls)
        try:
            yield
        finally:
            self._calls -= 1
            if not self._calls:
                self._quiet.set()
            CALLS.set(self._calls)

    async def flush(self, trajectory_id: str, backlog: Backlog, writer: ActorRef) -> None:
        """Waits until all recorded turns of a trajectory are durable. Raises
        `FailedPrecondition` when the pool refused one, `Unavailable` when it does not answer."""
        done: asyncio.Future[None] = await writer.ask(
            Flush(trajectory_id=trajectory_id), timeout_s=FLUSH_TIMEOUT_S
        )
        try:
            await asyncio.wait_for(done, FLUSH_TIMEOUT_S)
        except TimeoutError:
            raise Unavailable(
                f"pool shard {backlog.pool_shard} did not acknowledge all turns of "
                f"{trajectory_id} within {FLUSH_TIMEOUT_S:g} s"
            ) from None

    async def sweep(self) -> None:
        """Drops sessions that have been idle for long."""
        oldest_s = self._clock() - self._limits.idle_s
        for session in list(self._sessions.values()):
            if session.idle and session.used_s < oldest_s:
                await self._drop(session)

    async def drain(self) -> None:
        """Refuses new calls, and waits for those in flight and for the disk."""
        self._draining = True
        if self._calls:
            await self._quiet.wait()
        for session in list(self._sessions.values()):
            if not session.idle:
                await self.flush(session.claims.trajectory_id, session.backlog, session.writer)

    async def _make(self, claims: Claims) -> Session:
        if not claims.pool_shard:
            raise PermissionDenied("the session token names no pool shard")
        parse_trajectory_id(claims.trajectory_id)
        await self._make_room()
        backlog, writer = await self._writer(claims.pool_shard)
        settings = self._settings(backlog, writer)
        actor = await self._actors.spawn(
            lambda: SessionActor(claims, settings), name=f"session-{claims.trajectory_id}"
        )
        session = Session(
            claims=claims, actor=actor, backlog=backlog, writer=writer, used_s=self._clock()
        )
        self._sessions[claims.trajectory_id] = session
        SESSIONS.set(len(self._sessions))
        return session

    async def _make_room(self) -> None:
        while len(self._sessions) >= self._limits.sessions:
            idle = next((session for session in self._sessions.values() if session.idle), None)
            if idle is None:
                raise ResourceExhausted(
                    f"{len(self._sessions)} sessions are in use, the most there may be",
                    retry_after_s=5.0,
                )
            await self._drop(idle)

    async def _drop(self, session: Session) -> None:
        trajectory_id = session.claims.trajectory_id
        del self._sessions[trajectory_id]
        session.backlog.forget(trajectory_id)
        SESSIONS.set(len(self._sessions))
        await session.actor.stop()

    async def _writer(self, pool_shard: str) -> tuple[Backlog, ActorRef]:
        known = self._writers.get(pool_shard)
        if known is None or not known[1].alive:
            backlog = (
                known[0]
                if known
                else Backlog(pool_shard=pool_shard, max_bytes=self._limits.backlog_bytes)
            )
            open_stream = self._open_stream(pool_shard)
            # Not in the context of the call that came first: it would log as that session.
            writer = await asyncio.get_running_loop().create_task(
                self._actors.spawn(
                    lambda: ShardWriter(backlog, open_stream), name=f"shard-writer-{pool_shard}"
                ),
                context=contextvars.Context(),
            )
            known = self._writers[pool_shard] = (backlog, writer)
        return known


def keeper(writer: ActorRef) -> Callable[[common_pb2.Turn], None]:
    """How sessions hand their turns to a shard writer."""
    return lambda turn: writer.tell(Append(turn=turn))
