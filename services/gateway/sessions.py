"""Sessions in the memory of this gateway: found by token, created on first use, evicted when idle.

Owns the session actors and shard writers, and the limits on memory. A session
leaves memory only if it is unused and all its turns are durable: after an idle time, or least
recently used first while a limit is exceeded. Its next call reads it back from the pool.
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
from forge.runtime.actors.actor_system import ActorRef, ActorSystem
from forge.runtime.security.tokens import Claims
from forge.runtime.telemetry import log
from services.gateway.actors.backlog import Backlog
from services.gateway.actors.messages import IsBusy, Reread
from services.gateway.actors.session import SessionActor, SessionSettings
from services.gateway.actors.shard_writer import Flush, OpenStream, ShardWriter, Waiting
from services.gateway.admission import CallAdmission
from services.gateway.metrics import SESSION_BYTES, SESSIONS

FLUSH_TIMEOUT_S = 60.0
"""Time limit for the turns of one session to become durable."""
REREAD_TIMEOUT_S = 60.0
REREAD_RETRY_S = 1.0
BUSY_TIMEOUT_S = 1.0
LONG_CALL_S = 30.0
"""An agent that cancels a call after this time was answered too late."""
EVICTION_PAUSE_S = 1.0
EVICT_TO = 0.95
"""Eviction stops at this share of a limit, so that not every call evicts."""


@dataclass(slots=True, kw_only=True)
class Session:
    """A session in memory, for its callers."""

    claims: Claims
    actor: ActorRef
    backlog: Backlog
    writer: ActorRef
    users: int = 0
    used_s: float = 0.0
    """Time of the last use."""
    size_bytes: int = 0
    """Approximate memory."""
    calls: int = 0
    """Model calls in flight."""
    called_s: float = 0.0
    """Start of the current period with calls in flight."""
    model_s: float = 0.0
    """Total length of the earlier periods with calls in flight."""
    unanswered: str = ""
    """Reason why the last ended call got no answer, if the agent did not cause it."""

    @property
    def idle(self) -> bool:
        """True if eviction loses no turn."""
        return not self.users and self.claims.trajectory_id not in self.backlog.by_trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLimits:
    """Limits on the sessions of this gateway."""

    sessions: int
    session_bytes: int
    idle_s: float
    backlog_bytes: int


class Sessions:
    """All sessions of this gateway."""

    def __init__(
        self,
        actors: ActorSystem,
        *,
        limits: SessionLimits,
        admission: CallAdmission,
        settings: Callable[[ActorRef, Callable[[str, int], None]], SessionSettings],
        open_stream: Callable[[str], OpenStream],
        clock: Callable[[], float],
    ) -> None:
        self._actors = actors
        self._limits = limits
        self._admission = admission
        self._settings = settings
        self._open_stream = open_stream
        self._clock = clock
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        """Least recently used first."""
        self._bytes = 0
        """Memory of all sessions."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: dict[str, tuple[Backlog, ActorRef, SessionSettings]] = {}
        self._creation = asyncio.Lock()
        self._evicting = False
        # Read at each scrape, so that a call does no work for it.
        SESSIONS.set_function(lambda: len(self._sessions))
        SESSION_BYTES.set_function(lambda: self._bytes)

    def use_session(self, claims: Claims) -> AbstractAsyncContextManager[Session]:
        """Holds the session of a verified token in memory for the length of a block."""
        return _Use(self, claims)

    async def acquire_session(self, claims: Claims) -> Session:
        """Begins a use; `release_session` has to follow."""
        session = self._sessions.get(claims.trajectory_id)
        if session is None or not session.actor.alive:
            # One at a time: two first calls must share one session.
            async with self._creation:
                session = self._sessions.get(claims.trajectory_id)
                if session is None or not session.actor.alive:
                    session = await self._create(claims)
        session.users += 1
        return session

    def release_session(self, session: Session) -> None:
        """Ends a use."""
        session.users -= 1
        session.used_s = self._clock()
        trajectory_id = session.claims.trajectory_id
        if trajectory_id in self._sessions:
            self._sessions.move_to_end(trajectory_id)

    @contextmanager
    def count_call(self, session: Session) -> Iterator[None]:
        """Admits one model call and measures its time; raises the errors of `admit`."""
        began_s = self._clock()
        if not session.calls:
            session.called_s = began_s
        session.calls += 1
        try:
            with self.admit(session):
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
        """Returns the time with calls in flight; overlapping calls count once."""
        running_s = self._clock() - session.called_s if session.calls else 0.0
        return session.model_s + running_s

    @contextmanager
    def admit(self, session: Session) -> Iterator[None]:
        """Admits one call for the length of a block. Raises `ResourceExhausted` when too many calls
        are in flight or too many turns are not yet durable, `Unavailable` while draining."""
        session.backlog.check_space()
        with self._admission.admit(session.claims):
            yield

    async def flush_turns(self, session: Session) -> None:
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

    async def evict_idle(self) -> None:
        """Evicts sessions that have been idle for long."""
        oldest_s = self._clock() - self._limits.idle_s
        for session in list(self._sessions.values()):
            if session.idle and session.used_s < oldest_s:
                async with self._creation:
                    await self._evict(session)

    async def drain(self) -> None:
        """Refuses new calls, and waits for calls in flight and for durable turns. If the turns of a
        session cannot become durable, raises the reason after waiting for all other sessions."""
        began_s = self._clock()
        await self._admission.drain()
        ending = [s for s in self._sessions.values() if s.used_s >= began_s or not s.idle]
        errors = await asyncio.gather(*map(self._settle, ending), return_exceptions=True)
        for error in errors:
            if error is not None:
                raise error

    async def _settle(self, session: Session) -> None:
        if session.actor.alive:
            # After all earlier messages, among them the end of a cancelled call with its turn.
            await session.actor.ask(IsBusy(), timeout_s=FLUSH_TIMEOUT_S)
        await self.flush_turns(session)

    async def _create(self, claims: Claims) -> Session:
        if not claims.pool_shard:
            raise PermissionDenied("the session token names no pool shard")
        parse_trajectory_id(claims.trajectory_id)
        await self._evict_for_new()
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

    async def _evict_for_new(self) -> None:
        if len(self._sessions) < self._limits.sessions:
            return
        await self._evict_to(int(self._limits.sessions * EVICT_TO), self._limits.session_bytes)
        if len(self._sessions) >= self._limits.sessions:
            raise ResourceExhausted(
                f"{len(self._sessions)} sessions are in use, the maximum",
                retry_after_s=5.0,
            )

    def _set_size(self, trajectory_id: str, size_bytes: int) -> None:
        """Stores the memory of a session; starts eviction above the limit."""
        session = self._sessions.get(trajectory_id)
        if session is None:
            return
        self._bytes += size_bytes - session.size_bytes
        session.size_bytes = size_bytes
        if self._bytes > self._limits.session_bytes and not self._evicting:
            self._evicting = True
            self._start_task(self._evict_above_limit())

    async def _evict_above_limit(self) -> None:
        try:
            async with self._creation:
                await self._evict_to(
                    len(self._sessions), int(self._limits.session_bytes * EVICT_TO)
                )
            if self._bytes > self._limits.session_bytes:
                # All sessions are in use, or the pool is unavailable: a retry at once would fail.
                await asyncio.sleep(EVICTION_PAUSE_S)
        finally:
            self._evicting = False

    async def _evict_to(self, sessions: int, size_bytes: int) -> None:
        """Evicts idle sessions, least recently used first, down to the two limits. The caller holds
        `_creation`."""
        for session in list(self._sessions.values()):
            if len(self._sessions) <= sessions and self._bytes <= size_bytes:
                return
            if session.idle:
                await self._evict(session)

    async def _evict(self, session: Session) -> None:
        """Evicts a session unless it is busy. The caller holds `_creation`, so no successor starts
        before the session has stopped."""
        trajectory_id = session.claims.trajectory_id
        if session.actor.alive and await self._busy(session):
            return
        if not session.idle or self._sessions.get(trajectory_id) is not session:
            return
        del self._sessions[trajectory_id]
        self._bytes -= session.size_bytes
        await session.actor.stop()

    async def _busy(self, session: Session) -> bool:
        """Returns True while calls are in flight or turns wait in the backlog. The actor first
        handles all earlier messages, such as the end of an aborted call with its turn."""
        try:
            if await session.actor.ask(IsBusy(), timeout_s=BUSY_TIMEOUT_S):
                return True
            ask = Waiting(trajectory_id=session.claims.trajectory_id)
            return bool(await session.writer.ask(ask, timeout_s=BUSY_TIMEOUT_S))
        except ForgeError:
            return True

    def _start_reread(self, trajectory_id: str) -> None:
        self._start_task(self._reread(trajectory_id))

    async def _reread(self, trajectory_id: str) -> None:
        """Rebuilds a session after another gateway used the number of its turn; retries until the
        pool answers."""
        session = self._sessions.get(trajectory_id)
        while session is not None and trajectory_id in session.backlog.contested:
            try:
                async with self.use_session(session.claims) as session:
                    await session.actor.ask(Reread(), timeout_s=REREAD_TIMEOUT_S)
                return
            except Exception as error:
                # Any error: no turn of the trajectory becomes durable before a success.
                bug = None if isinstance(error, ForgeError) else error
                log.warning(
                    "reread_failed", trajectory_id=trajectory_id, error=str(error), exc_info=bug
                )
            await asyncio.sleep(REREAD_RETRY_S)

    def _start_task(self, work: Coroutine[Any, Any, None]) -> None:
        # An empty context: the task must not log as the session of the current call.
        task = asyncio.get_running_loop().create_task(work, context=contextvars.Context())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _writer(self, pool_shard: str) -> tuple[Backlog, ActorRef, SessionSettings]:
        entry = self._writers.get(pool_shard)
        if entry is None or not entry[1].alive:
            backlog = (
                entry[0]
                if entry
                else Backlog(pool_shard=pool_shard, max_bytes=self._limits.backlog_bytes)
            )
            open_stream = self._open_stream(pool_shard)
            # An empty context: the writer must not log as the session of its first call.
            writer = await asyncio.get_running_loop().create_task(
                self._actors.spawn(
                    lambda: ShardWriter(backlog, open_stream, self._start_reread),
                    name=f"shard-writer-{pool_shard}",
                ),
                context=contextvars.Context(),
            )
            settings = self._settings(writer, self._set_size)
            entry = self._writers[pool_shard] = (backlog, writer, settings)
        return entry


class _Use:
    """The context manager of `use_session`; cheaper per call than a generator."""

    __slots__ = ("_claims", "_session", "_sessions")

    def __init__(self, sessions: Sessions, claims: Claims) -> None:
        self._sessions = sessions
        self._claims = claims
        self._session: Session | None = None

    async def __aenter__(self) -> Session:
        self._session = await self._sessions.acquire_session(self._claims)
        return self._session

    async def __aexit__(self, *error: object) -> None:
        assert self._session is not None, "entered before"
        self._sessions.release_session(self._session)
