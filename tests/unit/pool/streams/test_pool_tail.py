"""What a tail sends, where it resumes, and how it ends."""

from __future__ import annotations

import asyncio

import pytest

from forge.core.errors import FailedPrecondition, InvalidArgument, ResourceExhausted, Unavailable
from forge.v1 import pool_pb2
from services.pool.readers import ReaderThreads
from services.pool.streams import tail
from services.pool.streams.tail import Tails
from tests.support.pool.records import make_reward, make_turn
from tests.support.pool.store import append, reward, seal

CLOSED = pool_pb2.TRAJECTORY_CHANGE_CLOSED
REWARDED = pool_pb2.TRAJECTORY_CHANGE_REWARDED


class Reader:
    """Takes what a tail sends."""

    def __init__(self) -> None:
        self.taken: list[pool_pb2.TailTrajectoriesResponse] = []
        self.takes = asyncio.Event()
        self.takes.set()
        self._news = asyncio.Event()

    async def send(self, response: pool_pb2.TailTrajectoriesResponse) -> None:
        await self.takes.wait()
        self.taken.append(response)
        self._news.set()

    async def reach(self, count: int) -> list[pool_pb2.TailTrajectoriesResponse]:
        while len(self.taken) < count:
            self._news.clear()
            await self._news.wait()
        return self.taken

    @property
    def seen(self) -> list[tuple[int, str]]:
        return [(one.change, one.summary.trajectory_id) for one in self.taken if one.change]


@pytest.fixture
async def tails(store):
    readers = ReaderThreads(2)
    made = Tails(store, readers, stall_s=0.05)
    yield made
    await readers.close()


def close(store, *tasks: str) -> None:
    for task in tasks:
        append(store, make_turn(f"{task}:0:0"))
        seal(store, f"{task}:0:0")


async def follow(tails: Tails, reader: Reader, **request) -> asyncio.Task[None]:
    """A tail that has begun."""
    wanted = pool_pb2.TailTrajectoriesRequest(**request)
    task = asyncio.create_task(tails.follow(wanted, reader.send))
    await reader.reach(1)
    return task


async def test_tail_begins_now(store, tails):
    """Earlier closed trajectories are left out; later closed and rewarded ones come in that order,
    each in its current form."""
    close(store, "before")
    reader = Reader()
    task = await follow(tails, reader)
    close(store, "a", "b")
    reward(store, make_reward("late", 0.5), trajectory_id="before:0:0")
    reward(store, make_reward("early"), trajectory_id="open:0:0")
    tails.announce()
    await reader.reach(4)
    assert reader.seen == [(CLOSED, "a:0:0"), (CLOSED, "b:0:0"), (REWARDED, "before:0:0")]
    assert [event.value for event in reader.taken[-1].summary.rewards] == [0.5]
    task.cancel()


async def test_cursor_resumes_behind_its_response(store, tails):
    """From any response's cursor the rest follows, each trajectory once."""
    close(store, *"abcd")
    first = Reader()
    task = await follow(tails, first, from_start=True)
    await first.reach(5)
    task.cancel()
    for at, response in enumerate(first.taken):
        again = Reader()
        task = await follow(tails, again, cursor=response.cursor)
        await again.reach(5 - at)
        assert first.seen[:at] + again.seen == first.seen
        task.cancel()


async def test_trajectory_with_later_rewards_is_sent_once_more(store, tails):
    """With all of its rewards."""
    close(store, "a", "b")
    for number in range(5):
        reward(store, make_reward(f"late{number}"), trajectory_id="a:0:0")
    reader = Reader()
    task = await follow(tails, reader, from_start=True)
    await reader.reach(4)
    assert reader.seen == [(CLOSED, "a:0:0"), (CLOSED, "b:0:0"), (REWARDED, "a:0:0")]
    assert len(reader.taken[-1].summary.rewards) == 5
    task.cancel()


async def test_filter_without_matches_still_moves_the_cursor(store, tails, monkeypatch):
    """A reader without matches gets its progress now and then."""
    monkeypatch.setattr(tail, "PAGE_ENTRIES", 4)
    close(store, *(f"t{number}" for number in range(9)))
    reader = Reader()
    wanted = pool_pb2.TrajectoryFilter(domain="math")
    task = await follow(tails, reader, from_start=True, filter=wanted)
    await reader.reach(3)
    assert [response.cursor for response in reader.taken] == ["s0/0", "s0/4", "s0/8"]
    assert reader.seen == []
    task.cancel()


async def test_slow_reader_is_ended_with_its_cursor(store, tails):
    """RESOURCE_EXHAUSTED names the cursor, from which nothing is missing; the writer does not wait
    for the reader."""
    reader = Reader()
    task = await follow(tails, reader)
    reader.takes.clear()
    close(store, "a", "b")
    tails.announce()
    with pytest.raises(ResourceExhausted, match=r"not taken for 0.05 s: .* cursor s0/0$"):
        await task
    reader.takes.set()
    again = Reader()
    task = await follow(tails, again, cursor="s0/0")
    await again.reach(3)
    assert again.seen == [(CLOSED, "a:0:0"), (CLOSED, "b:0:0")]
    task.cancel()


async def test_drain_ends_every_tail_with_its_cursor(store, tails):
    """UNAVAILABLE, and the cursor to continue with at the next instance."""
    reader = Reader()
    task = await follow(tails, reader)
    close(store, "a")
    tails.announce()
    await reader.reach(2)
    tails.drain()
    with pytest.raises(Unavailable, match="draining: resume from cursor s0/1"):
        await task


@pytest.mark.parametrize(
    ("cursor", "error", "complaint"),
    [
        ("x", InvalidArgument, "cursor 'x' is not a cursor of a pool"),
        ("s0/-1", InvalidArgument, "not a cursor of a pool"),
        ("s1/0", InvalidArgument, "not of pool shard 's0'"),
        ("s0/7", FailedPrecondition, "behind the newest change 1 of the shard"),
    ],
)
async def test_cursor_of_another_shard_is_refused(store, tails, cursor, error, complaint):
    """Also an invented one, and one beyond the end of a restored copy."""
    close(store, "a")
    request = pool_pb2.TailTrajectoriesRequest(cursor=cursor)
    with pytest.raises(error, match=complaint):
        await tails.follow(request, Reader().send)


async def test_tails_are_bounded(tails, monkeypatch):
    """One too many is refused with a hint when to retry, and accepted once another has ended."""
    monkeypatch.setattr(tail, "MAX_TAILS", 1)
    task = await follow(tails, Reader())
    with pytest.raises(ResourceExhausted, match="1 tails are open already"):
        await tails.follow(pool_pb2.TailTrajectoriesRequest(), Reader().send)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    task = await follow(tails, Reader())
    task.cancel()
