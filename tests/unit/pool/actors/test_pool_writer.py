"""How changes become commits, and how much a sender may have in flight."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from forge.core.errors import ActorStopped, InvalidArgument, ResourceExhausted
from forge.runtime.rpc.chunks import split
from forge.v1 import common_pb2, pool_pb2
from services.pool import validation
from services.pool.actors.writer import COMMIT_BYTES, Writer
from services.pool.data.commands import AppendTurns, PutGroups
from services.pool.readers import MAX_PENDING_READS, ReaderThreads
from services.pool.store import PoolStore
from services.pool.streams.append import BATCH_TURNS, WINDOW_BYTES, AppendStream
from tests.support.pool.records import make_group, make_turn
from tests.support.runtime.waiting import settle

MIB = 1 << 20
MANY = 20_000
"""Rounds of the event loop: more than all turns of a sender take."""


@dataclass
class CommitLog(PoolStore):
    """Stands in for the store; remembers what each commit held."""

    commits: list[int] = field(default_factory=list)
    full: bool = False
    environment: Any = field(
        default_factory=lambda: SimpleNamespace(used_bytes=0, live_bytes=0, disk_free_bytes=0)
    )

    def commit(self, commands) -> list[int]:
        if self.full:
            raise ResourceExhausted("the disk is full", retry_after_s=2.0)
        self.commits.append(len(commands))
        return list(range(len(commands)))


def appending(size_bytes: int) -> AppendTurns:
    serialized = make_turn(messages_json="x" * size_bytes).SerializeToString()
    return AppendTurns(turns=(validation.new_turn(serialized),))


def test_batch_of_changes_is_one_commit():
    """A batch of small changes is one commit, answered in order."""
    store = CommitLog()
    assert Writer(store).receive_batch([appending(10)] * 5) == [0, 1, 2, 3, 4]
    assert store.commits == [5]


def test_commit_is_bounded_in_bytes():
    """A batch of large changes is split, so that memory and latency stay bounded."""
    store = CommitLog()
    Writer(store).receive_batch([appending(COMMIT_BYTES // 2 - 1000)] * 5)
    assert store.commits == [2, 2, 1]


def test_refused_commit_answers_each_of_its_changes():
    """If the disk is full, every sender gets the error with the hint when to retry."""
    writer = Writer(CommitLog(full=True))
    outcomes = writer.receive_batch([appending(10), PutGroups(groups=(make_group(),), fence=1)])
    assert [type(outcome) for outcome in outcomes] == [ResourceExhausted] * 2
    assert outcomes[0].retry_after_s == 2.0


@dataclass
class HeldWriter:
    """Stands in for the writer's ref; answers when it is let."""

    may_answer: asyncio.Event = field(default_factory=asyncio.Event)
    batches: list[int] = field(default_factory=list)
    error: Exception | None = None

    async def ask(self, message: AppendTurns, *, timeout_s: float) -> tuple[None, ...]:
        self.batches.append(len(message.turns))
        await self.may_answer.wait()
        if self.error is not None:
            raise self.error
        return (None,) * len(message.turns)


@dataclass
class Sender:
    """Sends turns as fast as they are read, the network taking its turn after each."""

    turns: list[common_pb2.Turn]
    sent: int = 0

    async def requests(self) -> AsyncIterator[pool_pb2.AppendTurnsRequest]:
        for turn in self.turns:
            for chunk in split(turn.SerializeToString()):
                yield pool_pb2.AppendTurnsRequest(sequence=self.sent, turn=chunk)
            self.sent += 1
            await settle(10)


async def answers_of(stream: AppendStream, sender: Sender) -> list[pool_pb2.AppendTurnsResponse]:
    return [answer async for answer in stream.responses(sender.requests())]


async def test_sender_waits_while_a_commit_hangs():
    """No more than the window is read from the stream."""
    writer = HeldWriter()
    sender = Sender(turns=[make_turn(f"t{i}:0:0", messages_json="x" * MIB) for i in range(40)])
    answering = asyncio.create_task(
        answers_of(AppendStream(writer, max_turn_bytes=2 * MIB), sender)
    )
    await settle(MANY)
    read_bytes = sender.sent * MIB
    assert writer.batches == [1]
    assert WINDOW_BYTES <= read_bytes <= WINDOW_BYTES + 3 * MIB
    writer.may_answer.set()
    answers = await answering
    assert [answer.sequence for answer in answers] == list(range(40))


async def test_turns_of_one_commit_time_form_the_next_commit():
    """Turns that arrive during a commit go to the writer in bounded batches."""
    writer = HeldWriter()
    sender = Sender(turns=[make_turn(f"t{i}:0:0") for i in range(2 * BATCH_TURNS)])
    answering = asyncio.create_task(answers_of(AppendStream(writer, max_turn_bytes=MIB), sender))
    await settle(MANY)
    writer.may_answer.set()
    assert len(await answering) == 2 * BATCH_TURNS
    assert writer.batches == [1, BATCH_TURNS, BATCH_TURNS - 1]


async def test_turns_of_one_message_are_answered_in_one():
    """A refused turn has its status there, the others are stored in one commit; whole turns behind
    a part of another end the stream."""
    turns = [make_turn(f"t{i}:0:0").SerializeToString() for i in range(3)]
    turns[1] = make_turn("t1:0:0", messages_json="x" * MIB).SerializeToString()
    message = pool_pb2.AppendTurnsRequest(
        turns=[pool_pb2.WholeTurn(sequence=7 + i, turn=turn) for i, turn in enumerate(turns)]
    )
    part = pool_pb2.AppendTurnsRequest(sequence=1, turn=common_pb2.Chunk(data=turns[0]))
    writer = HeldWriter()
    writer.may_answer.set()

    async def requests(*messages: pool_pb2.AppendTurnsRequest):
        for each in messages:
            yield each

    stream = AppendStream(writer, max_turn_bytes=MIB)
    (answer,) = [answer async for answer in stream.responses(requests(message))]
    answers = [answer, *answer.more]
    assert [each.sequence for each in answers] == [7, 8, 9]
    assert [bool(each.status_code) for each in answers] == [False, True, False]
    assert "max_turn_bytes" in answers[1].error
    assert writer.batches == [2]
    with pytest.raises(InvalidArgument, match="before the last chunk of sequence 1"):
        async for _ in AppendStream(writer, max_turn_bytes=MIB).responses(requests(part, message)):
            pass


async def test_each_turn_of_a_lost_commit_gets_a_retryable_error():
    """A commit without an answer fails its turns with a status that asks for a resend."""
    writer = HeldWriter(error=ActorStopped("actor writer has stopped"))
    writer.may_answer.set()
    (answer,) = await answers_of(
        AppendStream(writer, max_turn_bytes=MIB), Sender(turns=[make_turn()])
    )
    assert answer.status_code == grpc.StatusCode.UNAVAILABLE.value[0]


async def test_waiting_reads_are_bounded():
    """Beyond the limit a read is refused at once with a hint to retry; earlier reads finish."""
    readers = ReaderThreads(1)
    gate = asyncio.Event()
    loop = asyncio.get_running_loop()

    def blocked() -> int:
        asyncio.run_coroutine_threadsafe(gate.wait(), loop).result()
        return 1

    reads = [asyncio.create_task(readers.run(blocked)) for _ in range(MAX_PENDING_READS)]
    await settle(MANY)
    with pytest.raises(ResourceExhausted, match="reads are waiting"):
        await readers.run(blocked)
    gate.set()
    assert sum(await asyncio.gather(*reads)) == MAX_PENDING_READS
    await readers.close()
