"""One AppendTurns call: turns in, durable answers out.

Owns the joining of chunks, the bound on unanswered turns, and the order of answers. Turns that
arrive during a commit make the next batch: one message to the writer per commit.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple

import grpc

from forge.core.errors import ForgeError, InvalidArgument, ResourceExhausted, Unavailable
from forge.runtime.concurrency.byte_queue import ByteQueue
from forge.runtime.concurrency.tasks import cancel_and_wait
from forge.runtime.rpc.chunks import Joiner
from forge.runtime.tracing import SpanRole, start_span
from forge.v1 import pool_pb2
from services.pool import validation
from services.pool.actors.writer import WriterRef
from services.pool.data.commands import AppendTurns, NewTurn
from services.pool.metrics import REFUSALS

COMMIT_TIMEOUT_S = 30.0
BATCH_TURNS = 256
"""Most turns of one stream in one commit."""
WINDOW_BYTES = 8 << 20
"""Most bytes that wait for a commit; then the stream is not read: backpressure."""


class _Arrival(NamedTuple):
    sequence: int
    turn: NewTurn | ForgeError
    """An error: the turn was refused before it reached the store."""
    size_bytes: int


class AppendStream:
    """The state of one call."""

    def __init__(self, writer: WriterRef, *, max_turn_bytes: int) -> None:
        self._writer = writer
        self._assembly = _Assembly(max_turn_bytes)
        self._waiting = ByteQueue[_Arrival](WINDOW_BYTES)
        self._draining = False
        self._together = False
        """The sender puts several turns in a message, and takes answers likewise."""
        self._intake: asyncio.Task[None] | None = None

    async def responses(
        self, requests: AsyncIterator[pool_pb2.AppendTurnsRequest]
    ) -> AsyncIterator[pool_pb2.AppendTurnsResponse]:
        """Yields one answer per turn, in the order of arrival, until the sender ends."""
        self._intake = asyncio.create_task(self._take_in(requests))
        if self._draining:
            self._intake.cancel()
        try:
            while batch := await self._next_batch():
                answers = await self._store(batch)
                if self._together:
                    answers[0].more.extend(answers[1:])
                    del answers[1:]
                for answer in answers:
                    yield answer
            if self._draining:
                raise Unavailable("this pool instance is draining: resend turns without an answer")
            await self._intake
        finally:
            await cancel_and_wait(self._intake)

    def drain(self) -> None:
        """Stops reading, answers every turn that has arrived, then ends the call; also before it
        begins."""
        self._draining = True
        self._waiting.end()
        if self._intake is not None:
            self._intake.cancel()

    async def _take_in(self, requests: AsyncIterator[pool_pb2.AppendTurnsRequest]) -> None:
        try:
            async for request in requests:
                arrivals = self._assembly.add(request)
                if not arrivals:
                    continue
                self._together = self._together or bool(request.turns)
                self._put(arrivals)
                await self._waiting.until_room()
            self._put(self._assembly.end())
        finally:
            self._waiting.end()

    def _put(self, arrivals: Sequence[_Arrival]) -> None:
        for arrival in arrivals:
            self._waiting.put(arrival, arrival.size_bytes)

    async def _next_batch(self) -> list[_Arrival]:
        """The turns since the last batch; empty at the end."""
        await self._waiting.until_filled()
        return self._waiting.take(max_items=BATCH_TURNS)

    async def _store(self, batch: list[_Arrival]) -> list[pool_pb2.AppendTurnsResponse]:
        turns = tuple(a.turn for a in batch if isinstance(a.turn, NewTurn))
        for arrival in batch:
            if isinstance(arrival.turn, ForgeError):
                REFUSALS.labels(AppendTurns.__name__, arrival.turn.code).inc()
        try:
            answers = iter(await self._commit(turns))
        except ForgeError as error:
            answers = iter([error] * len(turns))
        return [
            _response(a.sequence, next(answers) if isinstance(a.turn, NewTurn) else a.turn)
            for a in batch
        ]

    async def _commit(self, turns: tuple[NewTurn, ...]) -> tuple[ForgeError | None, ...]:
        if not turns:
            return ()
        # Below the model call of each turn: one commit is of many traces.
        spans = [
            start_span(
                "append_turn",
                kind=SpanRole.SERVER,
                parent=turn.traceparent,
                attributes={"forge.turn_index": turn.head.turn_index},
            )
            for turn in turns
            if turn.traceparent
        ]
        try:
            return await self._written(turns)
        except ForgeError as error:
            for span in spans:
                span.fail(error)
            raise
        finally:
            for span in spans:
                span.end()

    async def _written(self, turns: tuple[NewTurn, ...]) -> tuple[ForgeError | None, ...]:
        answers: tuple[ForgeError | None, ...] = await self._writer.ask(
            AppendTurns(turns=turns), timeout_s=COMMIT_TIMEOUT_S
        )
        return answers


def _response(sequence: int, error: ForgeError | None) -> pool_pb2.AppendTurnsResponse:
    if error is None:
        return pool_pb2.AppendTurnsResponse(sequence=sequence)
    code: int = grpc.StatusCode[error.code].value[0]
    return pool_pb2.AppendTurnsResponse(sequence=sequence, status_code=code, error=str(error))


class _Assembly:
    """Takes turns out of messages: several complete ones, or a chunk of one."""

    def __init__(self, max_turn_bytes: int) -> None:
        self._max_turn_bytes = max_turn_bytes
        self._joiner = Joiner(max_bytes=max_turn_bytes)
        self._begun: int | None = None
        """Sequence number of the turn whose chunks are coming in."""
        self._refusal: InvalidArgument | None = None

    def add(self, request: pool_pb2.AppendTurnsRequest) -> list[_Arrival]:
        """The turns that this message completes.

        A turn that is too large or malformed is refused alone. Raises `InvalidArgument` if chunks
        of two turns are mixed: the stream is then unusable.
        """
        if request.turns:
            if self._begun is not None:
                raise InvalidArgument(
                    f"whole turns came before the last chunk of sequence {self._begun}"
                )
            return [self._whole(each) for each in request.turns]
        arrival = self._chunk(request)
        return [] if arrival is None else [arrival]

    def end(self) -> list[_Arrival]:
        """The refusal of a turn without its last chunk."""
        if self._begun is None:
            return []
        refusal = self._refusal or InvalidArgument(
            f"the stream ended before the last chunk of sequence {self._begun}: "
            f"{self._joiner.pending_bytes} bytes of it came"
        )
        return [_Arrival(sequence=self._begun, turn=refusal, size_bytes=0)]

    def _whole(self, each: pool_pb2.WholeTurn) -> _Arrival:
        size = len(each.turn)
        turn = _checked(each.turn) if size <= self._max_turn_bytes else self._too_big()
        return _Arrival(sequence=each.sequence, turn=turn, size_bytes=size)

    def _too_big(self) -> InvalidArgument:
        # Not "retry later", which the status of a full queue would mean.
        return InvalidArgument(f"the turn exceeds max_turn_bytes {self._max_turn_bytes}")

    def _chunk(self, request: pool_pb2.AppendTurnsRequest) -> _Arrival | None:
        if self._begun not in (None, request.sequence):
            raise InvalidArgument(
                f"a chunk of sequence {request.sequence} came before the last one of {self._begun}"
            )
        self._begun = request.sequence
        serialized = self._join(request)
        if not request.turn.last:
            return None
        turn = self._refusal or _checked(serialized)
        self._begun, self._refusal = None, None
        return _Arrival(sequence=request.sequence, turn=turn, size_bytes=len(serialized))

    def _join(self, request: pool_pb2.AppendTurnsRequest) -> bytes:
        """Returns the bytes of a complete turn; chunks after a refusal are dropped."""
        if self._refusal is None:
            try:
                return self._joiner.add(request.turn) or b""
            except ResourceExhausted:
                self._refusal = self._too_big()
            except InvalidArgument as error:
                self._refusal = error
            self._joiner = Joiner(max_bytes=self._max_turn_bytes)
        return b""


def _checked(serialized: bytes) -> NewTurn | ForgeError:
    try:
        return validation.new_turn(serialized)
    except InvalidArgument as error:
        return error
