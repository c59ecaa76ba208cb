"""Writes the turns of one pool shard, on one stream, and resends them until acknowledged.

Owns the stream, its messages and its retries; `backlog` owns the turns that are not durable yet.

One turn per trajectory is in flight. If another gateway used its number, no later turn of the
trajectory may be stored: the session renumbers its waiting turns (`Waiting`, `Replace`).

While the pool owes an answer, turns gather: under load, one message per group commit of the pool.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import grpc.aio

from forge.core.errors import DeadlineExceeded, FailedPrecondition, ForgeError, Unavailable
from forge.runtime.actors.actor import Actor
from forge.runtime.concurrency.tasks import cancel_and_wait
from forge.runtime.rpc.chunks import CHUNK_BYTES, chunked, split
from forge.runtime.rpc.status import from_rpc_error
from forge.runtime.telemetry import log
from forge.v1 import common_pb2, pool_pb2
from services.gateway.actors.backlog import Backlog
from services.gateway.metrics import CONTESTED_TURNS, REFUSED_TURNS

_RETRY_S = 0.5
_SILENCE_S = 30.0
"""Time without an owed answer after which the stream is replaced."""
GATHER_TURNS = 64
"""Unsent turns that are sent even while the pool owes an answer."""
_RETRYABLE = frozenset(
    grpc.StatusCode[name].value[0]
    for name in ("RESOURCE_EXHAUSTED", "UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED")
)
"""Statuses after which a retry may succeed, for example a full disk."""
_NUMBER_USED: int = grpc.StatusCode.ABORTED.value[0]
"""Status of a turn whose number another gateway has used."""


class AppendStream(Protocol):
    """The client side of one AppendTurns call."""

    async def write(self, request: pool_pb2.AppendTurnsRequest) -> None:
        """Sends one message."""

    async def read(self) -> Any:
        """Returns the next answer."""

    def cancel(self) -> bool:
        """Ends the call."""


OpenStream = Callable[[], Awaitable[AppendStream]]
"""Opens a stream to the current leader of the shard. Raises `Unavailable`, `FailedPrecondition` for
a shard that was retired or declared lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Append:
    """Makes a turn durable."""

    turn: common_pb2.Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Flush:
    """The answer is a future: done when no turn waits, failed if the pool refused a turn."""

    trajectory_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """Requests the turns of a trajectory that are not durable yet, in order."""

    trajectory_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Replace:
    """Replaces the waiting turns of a trajectory."""

    trajectory_id: str
    turns: Sequence[common_pb2.Turn]


class ShardWriter(Actor):
    """Sends the backlog of one pool shard."""

    mailbox_size: ClassVar[int] = 1 << 16

    def __init__(
        self, backlog: Backlog, open_stream: OpenStream, renumber: Callable[[str], None]
    ) -> None:
        """`renumber` receives each trajectory whose turns need new numbers."""
        self._backlog = backlog
        self._open_stream = open_stream
        self._renumber = renumber
        self._changed = asyncio.Event()
        self._unanswered = 0
        """Turns sent on this stream without an answer so far."""
        self._answers = 0
        """Messages received, on all streams."""
        self._pump: asyncio.Task[None] | None = None

    async def started(self) -> None:
        """Starts to send."""
        self._pump = asyncio.get_running_loop().create_task(self._run())

    async def stopped(self) -> None:
        """Stops to send."""
        await cancel_and_wait(self._pump)

    async def receive(self, message: Any) -> Any:
        """Handles one message of a session."""
        match message:
            case Append(turn=turn):
                self._backlog.add_turn(turn)
                self._changed.set()
                return None
            case Waiting(trajectory_id=trajectory_id):
                return self._backlog.turns_of(trajectory_id)
            case Replace(trajectory_id=trajectory_id, turns=turns):
                self._backlog.replace_turns(trajectory_id, turns)
                self._backlog.complete_flushes(trajectory_id)
                self._changed.set()
                return None
            case Flush(trajectory_id=trajectory_id):
                done = asyncio.get_running_loop().create_future()
                self._backlog.flushes.setdefault(trajectory_id, []).append(done)
                self._backlog.complete_flushes(trajectory_id)
                return done
            case _:
                return await super().receive(message)

    async def _run(self) -> None:
        while True:
            try:
                await self._stream_turns()
            except FailedPrecondition as error:
                self._shard_gone(error)
            except Exception as error:
                # Any error: the turns wait for a new stream.
                self._stream_lost(
                    error.exceptions if isinstance(error, ExceptionGroup) else [error]
                )
            await asyncio.sleep(_RETRY_S)

    def _shard_gone(self, error: FailedPrecondition) -> None:
        refused = len(self._backlog.waiting)
        self._backlog.refuse_all(str(error))
        REFUSED_TURNS.inc(refused)
        log.error(
            "pool_shard_gone", pool_shard=self._backlog.pool_shard, turns=refused, error=str(error)
        )

    def _stream_lost(self, errors: Sequence[Exception]) -> None:
        causes = [from_rpc_error(e) if isinstance(e, grpc.aio.AioRpcError) else e for e in errors]
        bug = next((error for error in causes if not isinstance(error, ForgeError)), None)
        (log.warning if bug is None else log.error)(
            "pool_stream_lost",
            pool_shard=self._backlog.pool_shard,
            unacknowledged=len(self._backlog.waiting),
            error="; ".join(map(str, causes)),
            exc_info=bug,
        )

    async def _stream_turns(self) -> None:
        """Opens one stream and sends on it until it is lost."""
        while not self._backlog.waiting:
            await self._wait_for_change()
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
                        # grpc raises this after the end of the RPC, before its status is read.
                        raise Unavailable("the pool ended the stream") from None
            await self._wait_for_change()

    async def _expect_answers(self) -> None:
        """Raises `DeadlineExceeded` when sent turns get no answer."""
        while True:
            owes, answers = self._unanswered > 0, self._answers
            await asyncio.sleep(_SILENCE_S)
            if owes and self._unanswered > 0 and self._answers == answers:
                raise DeadlineExceeded(
                    f"pool shard {self._backlog.pool_shard} acknowledged nothing for "
                    f"{_SILENCE_S:g} s"
                )

    def _is_due(self) -> bool:
        """Returns True if enough turns are unsent for a message."""
        return len(self._backlog.unsent) >= (GATHER_TURNS if self._unanswered else 1)

    def _requests(self) -> Iterator[pool_pb2.AppendTurnsRequest]:
        """Yields the unsent turns: as many per message as fit, a large one in chunks."""
        turns = chunked(
            self._unsent_turns(), size_of=lambda turn: len(turn[1]), max_bytes=CHUNK_BYTES
        )
        for message in turns:
            sequence, data = message[0]
            if len(data) > CHUNK_BYTES:
                for chunk in split(data):
                    yield pool_pb2.AppendTurnsRequest(sequence=sequence, turn=chunk)
            else:
                whole = [pool_pb2.WholeTurn(sequence=number, turn=turn) for number, turn in message]
                yield pool_pb2.AppendTurnsRequest(turns=whole)

    def _unsent_turns(self) -> Iterator[tuple[int, bytes]]:
        backlog = self._backlog
        while backlog.unsent:
            sequence = backlog.unsent.popleft()
            turn = backlog.waiting.get(sequence)
            if turn is not None:
                self._unanswered += 1
                yield sequence, turn.data

    async def _read(self, stream: AppendStream) -> None:
        while True:
            response = await stream.read()
            if not isinstance(response, pool_pb2.AppendTurnsResponse):
                raise Unavailable("the pool ended the stream")
            self._answers += 1
            self._unanswered -= 1 + len(response.more)
            self._acknowledged(response)
            for answer in response.more:
                self._acknowledged(answer)
            self._changed.set()

    def _acknowledged(self, response: pool_pb2.AppendTurnsResponse) -> None:
        backlog = self._backlog
        if response.status_code in _RETRYABLE:
            if not backlog.rejection:
                log.warning("turns_delayed", pool_shard=backlog.pool_shard, error=response.error)
            backlog.rejection = response.error
            asyncio.get_running_loop().call_later(_RETRY_S, self._resend, response.sequence)
            return
        if response.status_code == _NUMBER_USED:
            self._number_used(response)
            return
        turn = backlog.remove_turn(response.sequence)
        if turn is None:
            return
        if not response.status_code:
            backlog.rejection = ""
        else:
            refusal = f"the pool refused turn {turn.turn_index}: {response.error}"
            backlog.store_refusal(turn.trajectory_id, refusal)
            REFUSED_TURNS.inc()
            log.error("turn_refused", trajectory_id=turn.trajectory_id, error=refusal)
        backlog.complete_flushes(turn.trajectory_id)

    def _number_used(self, response: pool_pb2.AppendTurnsResponse) -> None:
        turn = self._backlog.waiting.get(response.sequence)
        if turn is None or turn.trajectory_id in self._backlog.contested:
            return
        self._backlog.contested.add(turn.trajectory_id)
        CONTESTED_TURNS.inc()
        log.warning("turn_contested", trajectory_id=turn.trajectory_id, error=response.error)
        self._renumber(turn.trajectory_id)

    def _resend(self, sequence: int) -> None:
        turn = self._backlog.waiting.get(sequence)
        if turn is not None and turn.trajectory_id not in self._backlog.contested:
            self._backlog.unsent.append(sequence)
            self._changed.set()

    async def _wait_for_change(self) -> None:
        await self._changed.wait()
        self._changed.clear()
