"""The way of turns into one pool shard: one stream, resent until acknowledged.

Owns the turns of one shard that are not durable yet. A turn leaves only when the pool has
acknowledged it, or has refused it for good; then its session can not be sealed any more. Agents
do not wait here: whoever closes a session does. How much may pile up is decided when a call
begins (`Backlog.admit`), never when its turn, already sampled, arrives.

Of each trajectory one turn is under way at a time. A turn refers to earlier ones by number, and
when another gateway was first with a number, nothing that was numbered after it may get through:
its session reads the trajectory again and numbers what waits anew (`Contested`, `Waiting`,
`Replace`).

While the pool owes an answer, turns gather, and go in one message when it has come: a message and
its answer cost more than the turns in them. Under load that is one message per commit of the pool.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import grpc.aio

from forge.core.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    ForgeError,
    ResourceExhausted,
    Unavailable,
)
from forge.runtime.actor import Actor
from forge.runtime.rpc.chunks import CHUNK_BYTES, split
from forge.runtime.rpc.status import from_rpc_error
from forge.runtime.telemetry import log
from forge.v1 import common_pb2, pool_pb2
from services.gateway.metrics import BACKLOG, CONTESTED_TURNS, REFUSED_TURNS

_RETRY_S = 0.5
_SILENCE_S = 30.0
"""A pool that answers nothing for so long, while it owes answers, gets another stream."""
GATHER_TURNS = 64
"""So many turns are sent at once, whatever the pool still has to answer."""
KEPT_REFUSALS = 10_000
_PASSING = frozenset(
    code.value[0]
    for code in (
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED,
    )
)
"""Statuses after which the same turn may be accepted later: a full disk, a restart."""
_TAKEN: int = grpc.StatusCode.ABORTED.value[0]
"""The status of a turn whose number another gateway was first with."""


class AppendStream(Protocol):
    """The client side of one AppendTurns call."""

    async def write(self, request: pool_pb2.AppendTurnsRequest) -> None: ...
    async def read(self) -> Any: ...
    def cancel(self) -> bool: ...


OpenStream = Callable[[], Awaitable[AppendStream]]
"""Opens a stream to the shard, wherever it is now. Raises `Unavailable`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Append:
    """Make this turn durable."""

    turn: common_pb2.Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Flush:
    """Answered with a future that is done once no turn of the trajectory is left waiting; it
    fails with `FailedPrecondition` if the pool refused one of them."""

    trajectory_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """Answered with the turns of a trajectory that are not durable yet, in order."""

    trajectory_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Replace:
    """Make these turns of a trajectory durable in place of those that wait."""

    trajectory_id: str
    turns: Sequence[common_pb2.Turn]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Waiting:
    trajectory_id: str
    turn_index: int
    data: bytes


@dataclass(slots=True, kw_only=True)
class Backlog:
    """Turns on their way. Outlives the actor, so that a crash of it loses none."""

    pool_shard: str
    max_bytes: int
    waiting: OrderedDict[int, _Waiting] = field(default_factory=OrderedDict)
    unsent: deque[int] = field(default_factory=deque)
    bytes: int = 0
    next_sequence: int = 1
    by_trajectory: dict[str, deque[int]] = field(default_factory=dict)
    """What waits of each trajectory, in order; only the first is sent."""
    contested: set[str] = field(default_factory=set)
    """Trajectories of which nothing is sent before it has been replaced."""
    refused: dict[str, str] = field(default_factory=dict)
    """Why a turn of a trajectory was refused for good; of so many trajectories, the last ones."""
    flushes: dict[str, list[asyncio.Future[None]]] = field(default_factory=dict)
    put_off: str = ""
    """Why the shard takes no turns for now, a full disk for one; empty once it has taken one."""

    def __post_init__(self) -> None:
        BACKLOG.labels(self.pool_shard).set_function(lambda: self.bytes)

    def admit(self) -> None:
        """Raises `ResourceExhausted` while too much waits already."""
        if self.bytes >= self.max_bytes:
            raise ResourceExhausted(
                f"{self.bytes >> 20} MiB of turns wait for {self.where}", retry_after_s=2.0
            )

    @property
    def where(self) -> str:
        """The shard, and why turns wait for it, where it has said so."""
        return f"pool shard {self.pool_shard}{self.put_off and f' ({self.put_off})'}"

    def add(self, turn: common_pb2.Turn) -> None:
        data = turn.SerializeToString()
        sequence, self.next_sequence = self.next_sequence, self.next_sequence + 1
        self.waiting[sequence] = _Waiting(
            trajectory_id=turn.trajectory_id, turn_index=turn.turn_index, data=data
        )
        queue = self.by_trajectory.setdefault(turn.trajectory_id, deque())
        queue.append(sequence)
        if len(queue) == 1:
            self.unsent.append(sequence)
        self.bytes += len(data)

    def resend_all(self) -> None:
        self.unsent = deque(
            queue[0]
            for trajectory_id, queue in self.by_trajectory.items()
            if trajectory_id not in self.contested
        )

    def remove(self, sequence: int) -> _Waiting | None:
        """Forgets a turn that was acknowledged or refused, and lets the next one of its trajectory
        go; None if that is known already."""
        turn = self.waiting.pop(sequence, None)
        if turn is None:
            return None
        self.bytes -= len(turn.data)
        queue = self.by_trajectory[turn.trajectory_id]
        assert queue[0] == sequence, "only the first turn of a trajectory is sent"
        queue.popleft()
        if queue:
            self.unsent.append(queue[0])
        else:
            del self.by_trajectory[turn.trajectory_id]
        return turn

    def turns_of(self, trajectory_id: str) -> list[common_pb2.Turn]:
        """What waits of a trajectory, in order."""
        queue = self.by_trajectory.get(trajectory_id, ())
        return [common_pb2.Turn.FromString(self.waiting[sequence].data) for sequence in queue]

    def replace(self, trajectory_id: str, turns: Sequence[common_pb2.Turn]) -> None:
        """Forgets what waits of a trajectory, and takes `turns` for it."""
        for sequence in self.by_trajectory.pop(trajectory_id, ()):
            self.bytes -= len(self.waiting.pop(sequence).data)
        self.contested.discard(trajectory_id)
        for turn in turns:
            self.add(turn)

    def settle(self, trajectory_id: str) -> None:
        """Answers who waits for a trajectory, if nothing of it is left."""
        if trajectory_id in self.by_trajectory:
            return
        why = self.refused.get(trajectory_id)
        for flush in self.flushes.pop(trajectory_id, ()):
            if flush.done():
                continue
            if why is None:
                flush.set_result(None)
            else:
                flush.set_exception(FailedPrecondition(why))

    def refuse(self, trajectory_id: str, why: str) -> None:
        """Remembers the first refusal, also when the session leaves memory: read back, it would
        have all that the pool has, and could be sealed."""
        self.refused.setdefault(trajectory_id, why)
        if len(self.refused) > KEPT_REFUSALS:
            del self.refused[next(iter(self.refused))]


class ShardWriter(Actor):
    mailbox_size: ClassVar[int] = 1 << 16

    def __init__(
        self, backlog: Backlog, open_stream: OpenStream, contested: Callable[[str], None]
    ) -> None:
        """`contested` is told the trajectories whose turns have to be numbered anew."""
        self._backlog = backlog
        self._open_stream = open_stream
        self._contested = contested
        self._more = asyncio.Event()
        self._unanswered = 0
        """Turns sent on this stream that have no answer yet."""
        self._answers = 0
        """Messages received."""
        self._pump: asyncio.Task[None] | None = None

    async def started(self) -> None:
        self._pump = asyncio.get_running_loop().create_task(self._run())

    async def stopped(self) -> None:
        if self._pump is not None:
            self._pump.cancel()
            await asyncio.wait({self._pump})

    async def receive(self, message: Any) -> Any:
        match message:
            case Append(turn=turn):
                self._backlog.add(turn)
                self._more.set()
                return None
            case Waiting(trajectory_id=trajectory_id):
                return self._backlog.turns_of(trajectory_id)
            case Replace(trajectory_id=trajectory_id, turns=turns):
                self._backlog.replace(trajectory_id, turns)
                self._backlog.settle(trajectory_id)
                self._more.set()
                return None
            case Flush(trajectory_id=trajectory_id):
                done = asyncio.get_running_loop().create_future()
                self._backlog.flushes.setdefault(trajectory_id, []).append(done)
                self._backlog.settle(trajectory_id)
                return done
            case _:
                return await super().receive(message)

    async def _run(self) -> None:
        while True:
            try:
                await self._stream_turns()
            except* Exception as group:
                # Whatever it was: turns wait, and only a new stream can bring them home.
                self._stream_lost(group.exceptions)
            await asyncio.sleep(_RETRY_S)

    def _stream_lost(self, errors: Sequence[Exception]) -> None:
        known = [from_rpc_error(e) if isinstance(e, grpc.aio.AioRpcError) else e for e in errors]
        bug = next((error for error in known if not isinstance(error, ForgeError)), None)
        (log.warning if bug is None else log.error)(
            "pool_stream_lost",
            pool_shard=self._backlog.pool_shard,
            unacknowledged=len(self._backlog.waiting),
            error="; ".join(map(str, known)),
            exc_info=bug,
        )

    async def _stream_turns(self) -> None:
        """One stream, from its opening to its loss."""
        while not self._backlog.waiting:
            await self._wait_for_more()
        stream = await self._open_stream()
        self._backlog.resend_all()
        self._unanswered = 0
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._write(stream))
                tasks.create_task(self._read(stream))
                tasks.create_task(self._expect_answers())
        finally:
            stream.cancel()

    async def _write(self, stream: AppendStream) -> None:
        while True:
            while self._is_due():
                for request in self._requests():
                    try:
                        await stream.write(request)
                    except asyncio.InvalidStateError:
                        # What grpc says when the call has ended but its status was not read yet.
                        raise Unavailable("the pool ended the stream") from None
            await self._wait_for_more()

    async def _expect_answers(self) -> None:
        """Raises `DeadlineExceeded` when turns are out and nothing comes back."""
        while True:
            owes, answers = self._unanswered > 0, self._answers
            await asyncio.sleep(_SILENCE_S)
            if owes and self._unanswered > 0 and self._answers == answers:
                raise DeadlineExceeded(
                    f"pool shard {self._backlog.pool_shard} acknowledged nothing for "
                    f"{_SILENCE_S:g} s"
                )

    def _is_due(self) -> bool:
        """Whether turns are to be sent now."""
        return len(self._backlog.unsent) >= (GATHER_TURNS if self._unanswered else 1)

    def _requests(self) -> Iterator[pool_pb2.AppendTurnsRequest]:
        """What is unsent: as many turns in a message as go, a large one in chunks."""
        backlog = self._backlog
        message, size = pool_pb2.AppendTurnsRequest(), 0
        while backlog.unsent:
            sequence = backlog.unsent.popleft()
            turn = backlog.waiting.get(sequence)
            if turn is None:
                continue
            self._unanswered += 1
            if message.turns and size + len(turn.data) > CHUNK_BYTES:
                yield message
                message, size = pool_pb2.AppendTurnsRequest(), 0
            if len(turn.data) > CHUNK_BYTES:
                for chunk in split(turn.data):
                    yield pool_pb2.AppendTurnsRequest(sequence=sequence, turn=chunk)
            else:
                message.turns.add(sequence=sequence, turn=turn.data)
                size += len(turn.data)
        if message.turns:
            yield message

    async def _read(self, stream: AppendStream) -> None:
        while True:
            response = await stream.read()
            if not isinstance(response, pool_pb2.AppendTurnsResponse):
                raise Unavailable("the pool ended the stream")
            self._answers += 1
            self._unanswered -= 1 + len(response.more)
            self._acknowledged(response)
            for each in response.more:
                self._acknowledged(each)
            self._more.set()

    def _acknowledged(self, response: pool_pb2.AppendTurnsResponse) -> None:
        backlog = self._backlog
        if response.status_code in _PASSING:
            if not backlog.put_off:
                log.warning("turns_put_off", pool_shard=backlog.pool_shard, error=response.error)
            backlog.put_off = response.error
            asyncio.get_running_loop().call_later(_RETRY_S, self._resend, response.sequence)
            return
        if response.status_code == _TAKEN:
            self._taken(response)
            return
        turn = backlog.remove(response.sequence)
        if turn is None:
            return
        if not response.status_code:
            backlog.put_off = ""
        else:
            why = f"the pool refused turn {turn.turn_index}: {response.error}"
            backlog.refuse(turn.trajectory_id, why)
            REFUSED_TURNS.inc()
            log.error("turn_refused", trajectory_id=turn.trajectory_id, error=why)
        backlog.settle(turn.trajectory_id)

    def _taken(self, response: pool_pb2.AppendTurnsResponse) -> None:
        turn = self._backlog.waiting.get(response.sequence)
        if turn is None or turn.trajectory_id in self._backlog.contested:
            return
        self._backlog.contested.add(turn.trajectory_id)
        CONTESTED_TURNS.inc()
        log.warning("turn_contested", trajectory_id=turn.trajectory_id, error=response.error)
        self._contested(turn.trajectory_id)

    def _resend(self, sequence: int) -> None:
        turn = self._backlog.waiting.get(sequence)
        if turn is not None and turn.trajectory_id not in self._backlog.contested:
            self._backlog.unsent.append(sequence)
            self._more.set()

    async def _wait_for_more(self) -> None:
        await self._more.wait()
        self._more.clear()
