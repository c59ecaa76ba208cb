"""The way of turns into a pool shard: acknowledged, refused, or sent again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio

import services.gateway.actors.shard_writer as shard_writer
from forge.core.errors import FailedPrecondition, ResourceExhausted
from forge.runtime.actors.actor_system import ActorRef, ActorSystem
from forge.runtime.rpc.chunks import Joiner
from forge.v1 import common_pb2, pool_pb2
from services.gateway.actors.backlog import Backlog
from services.gateway.actors.shard_writer import Append, Flush, Replace, ShardWriter, Waiting

WAIT_S = 60.0


class FakeShard:
    """The pool's side: every stream that was opened, and the answers a test gives."""

    def __init__(self) -> None:
        self.streams: asyncio.Queue[FakeStream] = asyncio.Queue()

    async def open(self) -> FakeStream:
        stream = FakeStream()
        self.streams.put_nowait(stream)
        return stream

    async def next_stream(self) -> FakeStream:
        return await asyncio.wait_for(self.streams.get(), WAIT_S)


class FakeStream:
    def __init__(self) -> None:
        self.received: asyncio.Queue[tuple[int, common_pb2.Turn]] = asyncio.Queue()
        self._answers: asyncio.Queue[Any] = asyncio.Queue()
        self._joiner = Joiner()
        self.messages = 0

    async def write(self, request: pool_pb2.AppendTurnsRequest) -> None:
        self.messages += 1
        for each in request.turns:
            self.received.put_nowait((each.sequence, common_pb2.Turn.FromString(each.turn)))
        if request.turns:
            return
        whole = self._joiner.add(request.turn)
        if whole is not None:
            self.received.put_nowait((request.sequence, common_pb2.Turn.FromString(whole)))

    async def read(self) -> Any:
        answer = await self._answers.get()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def cancel(self) -> bool:
        return True

    async def turn(self) -> tuple[int, int]:
        """Sequence number and index of the next turn that arrives."""
        sequence, turn = await asyncio.wait_for(self.received.get(), WAIT_S)
        return sequence, turn.turn_index

    def answer(
        self, sequence: int, code: grpc.StatusCode = grpc.StatusCode.OK, *, also: Sequence[int] = ()
    ) -> None:
        """Answers a turn, and in the same message further ones with success."""
        self._answers.put_nowait(
            pool_pb2.AppendTurnsResponse(
                sequence=sequence,
                status_code=code.value[0],
                error=code.name,
                more=[pool_pb2.AppendTurnsResponse(sequence=each) for each in also],
            )
        )

    def lose(self) -> None:
        metadata = grpc.aio.Metadata()
        error = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, metadata, metadata, "gone")
        self._answers.put_nowait(error)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_writer, "_RETRY_S", 0.0)
    # Each turn is sent as it comes, but in the tests of just that.
    monkeypatch.setattr(shard_writer, "GATHER_TURNS", 1)


@pytest.fixture
def shard() -> FakeShard:
    return FakeShard()


@pytest.fixture
def backlog() -> Backlog:
    return Backlog(pool_shard="s0", max_bytes=1000)


@pytest.fixture
def contested() -> list[str]:
    """Trajectories whose sessions had to renumber their turns."""
    return []


@pytest_asyncio.fixture
async def writer(
    shard: FakeShard, backlog: Backlog, contested: list[str]
) -> AsyncIterator[ActorRef]:
    system = ActorSystem("test")
    yield await system.spawn(
        lambda: ShardWriter(backlog, shard.open, contested.append), name="writer"
    )
    await system.stop()


def turn(index: int, trajectory_id: str = "t:0:0", size_bytes: int = 0) -> Append:
    return Append(
        turn=common_pb2.Turn(
            trajectory_id=trajectory_id, turn_index=index, messages_json="x" * size_bytes
        )
    )


async def flush(writer: ActorRef, trajectory_id: str = "t:0:0") -> asyncio.Future[None]:
    done: asyncio.Future[None] = await writer.ask(
        Flush(trajectory_id=trajectory_id), timeout_s=WAIT_S
    )
    return done


async def test_flush_waits_for_every_acknowledgement(writer: ActorRef, shard: FakeShard) -> None:
    """It ends with the last turn of its trajectory, independent of other trajectories."""
    writer.tell(turn(0))
    writer.tell(turn(0, "other:0:0"))
    writer.tell(turn(1))
    done = await flush(writer)
    stream = await shard.next_stream()
    mine, _ = await stream.turn()
    await stream.turn()
    stream.answer(mine)
    last, index = await stream.turn()
    assert (index, done.done()) == (1, False)
    stream.answer(last)
    await asyncio.wait_for(done, WAIT_S)
    assert not (await flush(writer, "other:0:0")).done()
    assert (await flush(writer, "never-seen:0:0")).done()


async def test_stream_without_acknowledgements_is_replaced(
    shard: FakeShard, backlog: Backlog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The turns are sent again on a new stream."""
    monkeypatch.setattr(shard_writer, "_SILENCE_S", 0.05)
    system = ActorSystem("test")
    writer = await system.spawn(
        lambda: ShardWriter(backlog, shard.open, lambda _: None), name="writer"
    )
    writer.tell(turn(0))
    silent = await shard.next_stream()
    sequence, _ = await silent.turn()
    answering = await shard.next_stream()
    assert await answering.turn() == (sequence, 0)
    await system.stop()


async def test_turn_is_sent_after_its_predecessor_is_durable(
    writer: ActorRef, shard: FakeShard
) -> None:
    """Other trajectories do not wait."""
    for index in range(2):
        writer.tell(turn(index))
    writer.tell(turn(0, "other:0:0"))
    stream = await shard.next_stream()
    first, index = await stream.turn()
    assert index == 0
    _, index = await stream.turn()
    assert index == 0
    assert stream.received.empty()
    stream.answer(first)
    assert (await stream.turn())[1] == 1


async def test_new_stream_resends_unacknowledged_turns(writer: ActorRef, shard: FakeShard) -> None:
    """In order."""
    for number in range(3):
        writer.tell(turn(0, f"t:{number}:0"))
    first = await shard.next_stream()
    sequences = [(await first.turn())[0] for _ in range(3)]
    first.answer(sequences[1])
    first.lose()
    second = await shard.next_stream()
    resent = [(await second.turn())[0] for _ in range(2)]
    assert resent == [sequences[0], sequences[2]]
    for number in (0, 2):
        second.answer(sequences[number])
        await asyncio.wait_for(await flush(writer, f"t:{number}:0"), WAIT_S)


async def test_contested_trajectory_waits_for_new_turn_numbers(
    writer: ActorRef, shard: FakeShard, contested: list[str]
) -> None:
    """A used number stops its trajectory until its session has replaced the waiting turns; later
    answers about the old turns are ignored."""
    for index in range(2):
        writer.tell(turn(index))
    stream = await shard.next_stream()
    old, _ = await stream.turn()
    stream.answer(old, grpc.StatusCode.ABORTED)
    waiting = await writer.ask(Waiting(trajectory_id="t:0:0"), timeout_s=WAIT_S)
    assert [one.turn_index for one in waiting] == [0, 1]
    done = await flush(writer)
    writer.tell(turn(0, "other:0:0"))
    await stream.turn()
    assert contested == ["t:0:0"]
    writer.tell(Replace(trajectory_id="t:0:0", turns=[turn(1).turn, turn(2).turn]))
    for expected in (1, 2):
        sequence, index = await stream.turn()
        assert (index, done.done()) == (expected, False)
        stream.answer(old)
        stream.answer(sequence)
    await asyncio.wait_for(done, WAIT_S)


async def test_turns_are_gathered_while_an_answer_is_pending(
    writer: ActorRef, shard: FakeShard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are sent and answered in one message; none is lost."""
    monkeypatch.setattr(shard_writer, "GATHER_TURNS", 10)
    writer.tell(turn(0, "first:0:0"))
    stream = await shard.next_stream()
    first, _ = await stream.turn()
    for number in range(5):
        writer.tell(turn(0, f"t:{number}:0"))
    done = [await flush(writer, f"t:{number}:0") for number in range(5)]
    assert (stream.messages, stream.received.empty()) == (1, True)
    stream.answer(first)
    sequences = [(await stream.turn())[0] for _ in range(5)]
    assert stream.messages == 2
    stream.answer(sequences[0], also=sequences[1:])
    await asyncio.wait_for(asyncio.gather(*done), WAIT_S)


async def test_many_turns_do_not_wait_for_an_answer(
    writer: ActorRef, shard: FakeShard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow pool gets more turns as soon as there are many."""
    monkeypatch.setattr(shard_writer, "GATHER_TURNS", 4)
    writer.tell(turn(0, "first:0:0"))
    stream = await shard.next_stream()
    await stream.turn()
    for number in range(4):
        writer.tell(turn(0, f"t:{number}:0"))
    for _ in range(4):
        await stream.turn()
    assert stream.messages == 2


async def test_turn_larger_than_a_message_is_sent_in_chunks(
    writer: ActorRef, shard: FakeShard
) -> None:
    """Alone, between messages that hold others."""
    for number, size_bytes in enumerate((10, 3 << 20, 10)):
        writer.tell(turn(0, f"t:{number}:0", size_bytes=size_bytes))
    stream = await shard.next_stream()
    sequences = [(await stream.turn())[0] for _ in range(3)]
    stream.answer(sequences[0], also=sequences[1:])
    for number in range(3):
        await asyncio.wait_for(await flush(writer, f"t:{number}:0"), WAIT_S)


async def test_writer_waits_for_a_full_disk(
    writer: ActorRef, shard: FakeShard, backlog: Backlog
) -> None:
    """RESOURCE_EXHAUSTED is not final: the turn is sent again on the same stream. Until it is
    accepted, callers that wait for the shard get the reason."""
    writer.tell(turn(0))
    stream = await shard.next_stream()
    sequence, _ = await stream.turn()
    stream.answer(sequence, grpc.StatusCode.RESOURCE_EXHAUSTED)
    again, index = await stream.turn()
    assert (again, index) == (sequence, 0)
    assert backlog.where.endswith(" (RESOURCE_EXHAUSTED)")
    stream.answer(again)
    await asyncio.wait_for(await flush(writer), WAIT_S)
    assert backlog.where == f"pool shard {backlog.pool_shard}"


async def test_permanently_refused_turn_fails_the_flush(writer: ActorRef, shard: FakeShard) -> None:
    """Its session cannot be sealed, and the error gives the reason."""
    writer.tell(turn(0))
    stream = await shard.next_stream()
    stream.answer((await stream.turn())[0], grpc.StatusCode.INVALID_ARGUMENT)
    with pytest.raises(FailedPrecondition, match="refused turn 0"):
        await asyncio.wait_for(await flush(writer), WAIT_S)
    with pytest.raises(FailedPrecondition):
        await (await flush(writer))


async def test_crashed_writer_loses_no_turn(
    backlog: Backlog, shard: FakeShard, contested: list[str]
) -> None:
    """The backlog outlives the actor: a new one sends it."""
    system = ActorSystem("test")
    first = await system.spawn(
        lambda: ShardWriter(backlog, shard.open, contested.append), name="one"
    )
    first.tell(turn(0))
    await (await shard.next_stream()).turn()
    await first.stop()
    second = await system.spawn(
        lambda: ShardWriter(backlog, shard.open, contested.append), name="two"
    )
    stream = await shard.next_stream()
    sequence, index = await stream.turn()
    assert index == 0
    stream.answer(sequence)
    await asyncio.wait_for(await flush(second), WAIT_S)
    await system.stop()


async def test_full_backlog_refuses_calls_but_accepts_turns(
    writer: ActorRef, shard: FakeShard, backlog: Backlog
) -> None:
    """New calls are refused; turns that were sampled meanwhile are accepted."""
    backlog.check_space()
    for number in range(2):
        writer.tell(turn(0, f"t:{number}:0", size_bytes=600))
    stream = await shard.next_stream()
    sequences = [(await stream.turn())[0] for _ in range(2)]
    with pytest.raises(ResourceExhausted):
        backlog.check_space()
    for number, sequence in enumerate(sequences):
        stream.answer(sequence)
        await asyncio.wait_for(await flush(writer, f"t:{number}:0"), WAIT_S)
    backlog.check_space()
    assert backlog.bytes == 0


async def test_turns_of_a_lost_shard_are_given_up(backlog: Backlog, contested: list[str]) -> None:
    """No shard will store them: their sessions may leave memory, and are not sealed."""

    async def gone() -> FakeStream:
        raise FailedPrecondition("pool shard s0 was declared lost on 2026-01-01 00:00 UTC")

    system = ActorSystem("test")
    writer = await system.spawn(lambda: ShardWriter(backlog, gone, contested.append), name="one")
    for index in range(2):
        writer.tell(turn(index))
    with pytest.raises(FailedPrecondition, match="was declared lost"):
        await asyncio.wait_for(await flush(writer), WAIT_S)
    assert (backlog.bytes, len(backlog.by_trajectory), len(backlog.unsent)) == (0, 0, 0)
    await system.stop()
