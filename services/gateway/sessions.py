"""All sessions of this gateway: found by token, made on first use, dropped when idle.

Owns the life of session actors and shard writers, how much memory sessions take, and how many
calls may be in flight. A session leaves memory only when nobody uses it and all its turns are
durable: after an idle time, or, the longest unused first, when there are too many or they are too
big. The next call with its token reads it back from the pool.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from forge.core.errors import ForgeError, PermissionDenied, ResourceExhausted, Unavailable
from forge.core.trajectory import parse_trajectory_id
from forge.runtime.actor_system import ActorRef, ActorSystem
from forge.runtime.security import Claims
from forge.runtime.telemetry import log
from services.gateway.actors.session import IsBusy, Reread, SessionActor, SessionSettings
from services.gateway.actors.shard_writer import (
    Backlog,
    Flush,
    OpenStream,
    ShardWriter,
    Waiting,
)
from services.gateway.metrics import CALLS, SESSION_BYTES, SESSIONS

FLUSH_TIMEOUT_S = 60.0
"""For the turns of one session to become durable."""
REREAD_TIMEOUT_S = 60.0
REREAD_RETRY_S = 1.0
BUSY_TIMEOUT_S = 1.0
LONG_CALL_S = 30.0
"""An agent that leaves a call after so long has not had its answer in time."""
RELIEF_PAUSE_S = 1.0
RELIEF = 0.95
"""Share of a limit that is left once it was reached, so that it is not reached at every call."""


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
    size_bytes: int = 0
    """About what it takes in memory."""
    calls: int = 0
    """Model calls in flight."""
    called_s: float = 0.0
    """Since when there is any."""
    model_s: float = 0.0
    """For how long there were any before."""
    unanswered: str = ""
    """Why the last call that ended got no answer, if that was no fault of the agent."""

    @property
    def idle(self) -> bool:
        """Whether it can be dropped without losing anything."""
        return not self.users and self.claims.trajectory_id not in self.backlog.by_trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLimits:
    """Bounds on what is kept and done at once."""

    sessions: int
    session_bytes: int
    calls: int
    idle_s: float
    backlog_bytes: int


class Sessions:
    def __init__(
        self,
        actors: ActorSystem,
        *,
        limits: SessionLimits,
        settings: Callable[[ActorRef, Callable[[str, int], None]], SessionSettings],
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
        self._bytes = 0
        """Of all sessions."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: dict[str, tuple[Backlog, ActorRef, SessionSettings]] = {}
        self._making = asyncio.Lock()
        self._calls = 0
        self._draining = False
        self._relieving = False
        self._quiet = asyncio.Event()
        """Set whenever no call is in flight."""
        # Counted when scraped, so that a call costs nothing here.
        CALLS.set_function(lambda: self._calls)
        SESSIONS.set_function(lambda: len(self._sessions))
        SESSION_BYTES.set_function(lambda: self._bytes)

    def use(self, claims: Claims) -> AbstractAsyncContextManager[Session]:
        """The session of a verified token, kept in memory meanwhile."""
        return _Use(self, claims)

    async def enter(self, claims: Claims) -> Session:
        """`use` without its end, which has to follow."""
        session = self._sessions.get(claims.trajectory_id)
        if session is None or not session.actor.alive:
            # One at a time: two first calls must find one session.
            async with self._making:
                session = self._sessions.get(claims.trajectory_id)
                if session is None or not session.actor.alive:
                    session = await self._make(claims)
        session.users += 1
        return session

    def leave(self, session: Session) -> None:
        session.users -= 1
        session.used_s = self._clock()
        trajectory_id = session.claims.trajectory_id
        if trajectory_id in self._sessions:
            self._sessions.move_to_end(trajectory_id)

    @contextmanager
    def call(self, session: Session) -> Iterator[None]:
        """One sampling call, answered unless an exception leaves the block. Raises
        `ResourceExhausted` when there are too many, or when too many turns wait for the disk;
        `Unavailable` while draining."""
        began_s = self._clock()
        if not session.calls:
            session.called_s = began_s
        session.calls += 1
        try:
            with self._admitted(session):
                yield
            session.unanswered = ""
        except ForgeError as error:
            session.unanswered = str(error) if error.retryable else ""
            raise
        except (GeneratorExit, asyncio.CancelledError):
            waited_s = self._clock() - began_s
            if waited_s >= LONG_CALL_S:
                session.unanswered = f"the agent left a call that took over {waited_s:.0f} s"
            raise
        finally:
            session.calls -= 1
            if not session.calls:
                session.model_s += self._clock() - session.called_s

    def model_s(self, session: Session) -> float:
        """For how long calls of a session have been in flight; those that overlap count once."""
        running_s = self._clock() - session.called_s if session.calls else 0.0
        return session.model_s + running_s

    @contextmanager
    def _admitted(self, session: Session) -> Iterator[None]:
        if self._draining:
            raise Unavailable("this gateway is draining", retry_after_s=0.0)
        if self._calls >= self._limits.calls:
            raise ResourceExhausted(
                f"{self._calls} calls are in flight, the most there may be", retry_after_s=1.0
            )
        session.backlog.admit()
        self._calls += 1
        self._quiet.clear()
        try:
            yield
        finally:
            self._calls -= 1
            if not self._calls:
                self._quiet.set()

    async def flush(self, session: Session) -> None:
        """Waits until all recorded turns of a session are durable. Raises
        `FailedPrecondition` when the pool refused one, `Unavailable` when it does not answer."""
        trajectory_id = session.claims.trajectory_id
        done: asyncio.Future[None] = await session.writer.ask(
            Flush(trajectory_id=trajectory_id), timeout_s=FLUSH_TIMEOUT_S
        )
        try:
            await asyncio.wait_for(done, FLUSH_TIMEOUT_S)
        except TimeoutError:
            raise Unavailable(
                f"not all turns of {trajectory_id} were acknowledged within "
                f"{FLUSH_TIMEOUT_S:g} s by {session.backlog.where}"
            ) from None

    async def sweep(self) -> None:
        """Drops sessions that have been idle for long."""
        oldest_s = self._clock() - self._limits.idle_s
        for session in list(self._sessions.values()):
            if session.idle and session.used_s < oldest_s:
                async with self._making:
                    await self._drop(session)

    async def drain(self) -> None:
        """Refuses new calls, and waits for those in flight and for the disk. Raises what kept a
        session's turns from it, once those of all others are durable."""
        self._draining = True
        began_s = self._clock()
        if self._calls:
            await self._quiet.wait()
        ending = [s for s in self._sessions.values() if s.used_s >= began_s or not s.idle]
        errors = await asyncio.gather(*map(self._settle, ending), return_exceptions=True)
        for error in errors:
            if error is not None:
                raise error

    async def _settle(self, session: Session) -> None:
        if session.actor.alive:
            # Behind all that was told: the end of a call that nobody waits for, and its turn.
            await session.actor.ask(IsBusy(), timeout_s=FLUSH_TIMEOUT_S)
        await self.flush(session)

    async def _make(self, claims: Claims) -> Session:
        if not claims.pool_shard:
            raise PermissionDenied("the session token names no pool shard")
        parse_trajectory_id(claims.trajectory_id)
        await self._make_room()
        backlog, writer, settings = await self._writer(claims.pool_shard)
        actor = await self._actors.spawn(
            lambda: SessionActor(claims, settings), name=f"session-{claims.trajectory_id}"
        )
        session = Session(
            claims=claims, actor=actor, backlog=backlog, writer=writer, used_s=self._clock()
        )
        dead = self._sessions.get(claims.trajectory_id)
        self._bytes -= dead.size_bytes if dead is not None else 0
        self._sessions[claims.trajectory_id] = session
        return session

    async def _make_room(self) -> None:
        if len(self._sessions) < self._limits.sessions:
            return
        await self._relieve(int(self._limits.sessions * RELIEF), self._limits.session_bytes)
        if len(self._sessions) >= self._limits.sessions:
            raise ResourceExhausted(
                f"{len(self._sessions)} sessions are in use, the most there may be",
                retry_after_s=5.0,
            )

    def _grown(self, trajectory_id: str, size_bytes: int) -> None:
        """A session takes so much memory now."""
        session = self._sessions.get(trajectory_id)
        if session is None:
            return
        self._bytes += size_bytes - session.size_bytes
        session.size_bytes = size_bytes
        if self._bytes > self._limits.session_bytes and not self._relieving:
            self._relieving = True
            self._start(self._relieve_pressure())

    async def _relieve_pressure(self) -> None:
        try:
            async with self._making:
                await self._relieve(len(self._sessions), int(self._limits.session_bytes * RELIEF))
            if self._bytes > self._limits.session_bytes:
                # All are in use, or the pool is away: looking again at once would find the same.
                await asyncio.sleep(RELIEF_PAUSE_S)
        finally:
            self._relieving = False

    async def _relieve(self, sessions: int, size_bytes: int) -> None:
        """Drops idle sessions, the longest unused first, until no more than so much is left; with
        `_making` held."""
        for session in list(self._sessions.values()):
            if len(self._sessions) <= sessions and self._bytes <= size_bytes:
                return
            if session.idle:
                await self._drop(session)

    async def _drop(self, session: Session) -> None:
        """Takes a session out of memory, unless it turns out to be needed; with `_making` held, so
        that no successor is made before it has stopped."""
        trajectory_id = session.claims.trajectory_id
        if session.actor.alive and await self._busy(session):
            return
        if not session.idle or self._sessions.get(trajectory_id) is not session:
            return
        del self._sessions[trajectory_id]
        self._bytes -= session.size_bytes
        await session.actor.stop()

    async def _busy(self, session: Session) -> bool:
        """Whether something is still under way, once all that was told has been handled: the end
        of an aborted call, and its turn."""
        try:
            if await session.actor.ask(IsBusy(), timeout_s=BUSY_TIMEOUT_S):
                return True
            ask = Waiting(trajectory_id=session.claims.trajectory_id)
            return bool(await session.writer.ask(ask, timeout_s=BUSY_TIMEOUT_S))
        except ForgeError:
            return True

    def _contested(self, trajectory_id: str) -> None:
        self._start(self._reread(trajectory_id))

    async def _reread(self, trajectory_id: str) -> None:
        """Another gateway was first with the number of a turn: has the session number its turns
        anew, however long the pool takes."""
        session = self._sessions.get(trajectory_id)
        while session is not None:
            try:
                async with self.use(session.claims) as session:
                    await session.actor.ask(Reread(), timeout_s=REREAD_TIMEOUT_S)
                return
            except Exception as error:
                # Whatever it was: nothing of the trajectory becomes durable before.
                bug = None if isinstance(error, ForgeError) else error
                log.warning(
                    "reread_failed", trajectory_id=trajectory_id, error=str(error), exc_info=bug
                )
            await asyncio.sleep(REREAD_RETRY_S)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        # Not in the context of the call at hand: it would log as that session.
        task = asyncio.get_running_loop().create_task(work, context=contextvars.Context())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _writer(self, pool_shard: str) -> tuple[Backlog, ActorRef, SessionSettings]:
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
                    lambda: ShardWriter(backlog, open_stream, self._contested),
                    name=f"shard-writer-{pool_shard}",
                ),
                context=contextvars.Context(),
            )
            settings = self._settings(writer, self._grown)
            known = self._writers[pool_shard] = (backlog, writer, settings)
        return known


class _Use:
    """A session in use. A class, as every call has one and a generator costs more."""

    __slots__ = ("_claims", "_session", "_sessions")

    def __init__(self, sessions: Sessions, claims: Claims) -> None:
        self._sessions = sessions
        self._claims = claims
        self._session: Session | None = None

    async def __aenter__(self) -> Session:
        self._session = await self._sessions.enter(self._claims)
        return self._session

    async def __aexit__(self, *error: object) -> None:
        assert self._session is not None, "entered before"
        self._sessions.leave(self._session)
