"""One append stream: turns that are refused before they reach the store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from prometheus_client import REGISTRY

from forge.core.errors import InvalidArgument, Unavailable
from forge.runtime.rpc.chunks import CHUNK_BYTES, split
from forge.v1 import common_pb2, pool_pb2
from services.pool.data.commands import AppendTurns
from services.pool.streams.append import AppendStream
from tests.support.pool.records import make_turn

MAX_TURN_BYTES = 4096
INVALID_ARGUMENT = grpc.StatusCode.INVALID_ARGUMENT.value[0]
NAN = b"\x00\x00\xc0\x7f" * 2


class Storing:
    """A writer that takes everything."""

    def __init__(self) -> None:
        self.stored: list[str] = []

    async def ask(self, message: AppendTurns, *, timeout_s: float) -> Any:
        self.stored += [f"{turn.trajectory}/{turn.head.turn_index}" for turn in message.turns]
        return (None,) * len(message.turns)


def refused_turns() -> float:
    labels = {"kind": "AppendTurns", "code": InvalidArgument.code}
    return REGISTRY.get_sample_value("forge_pool_refusals_total", labels) or 0.0


def with_nan() -> common_pb2.Turn:
    turn = make_turn("t:1:0")
    turn.sampled.logprobs = NAN
    return turn


BAD = {
    "no turn": b"\xff\xff\xff",
    "truncated": make_turn("t:1:0").SerializeToString()[:-3],
    "of no trajectory": make_turn("no trajectory").SerializeToString(),
    "oversized": make_turn("t:1:0", prompt=range(2000)).SerializeToString(),
    "not finite": with_nan().SerializeToString(),
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD.keys())
async def test_refused_turn_is_answered_and_counted_alone(bad: bytes) -> None:
    """The turns beside it are stored, and every answer is in its place."""
    before = refused_turns()
    writer = Storing()
    good = [make_turn("t:0:0", index).SerializeToString() for index in range(2)]
    turns = [
        pool_pb2.WholeTurn(sequence=sequence, turn=turn)
        for sequence, turn in enumerate((good[0], bad, good[1]))
    ]

    async def requests() -> AsyncIterator[pool_pb2.AppendTurnsRequest]:
        yield pool_pb2.AppendTurnsRequest(turns=turns)

    stream = AppendStream(writer, max_turn_bytes=MAX_TURN_BYTES)
    answers = [
        each async for first in stream.responses(requests()) for each in (first, *first.more)
    ]
    assert writer.stored == ["t:0:0/0", "t:0:0/1"]
    assert [bool(answer.status_code) for answer in answers] == [False, True, False]
    assert [answer.sequence for answer in answers] == [0, 1, 2]
    assert answers[1].error
    assert refused_turns() == before + 1


async def test_incomplete_turn_at_the_end_of_a_stream_is_refused() -> None:
    """It is answered by its number and counted; the turns before it are stored."""
    before = refused_turns()
    writer = Storing()
    cut_short = make_turn("t:1:0", messages_json="x" * CHUNK_BYTES).SerializeToString()

    async def requests() -> AsyncIterator[pool_pb2.AppendTurnsRequest]:
        for chunk in split(make_turn("t:0:0").SerializeToString()):
            yield pool_pb2.AppendTurnsRequest(sequence=6, turn=chunk)
        yield pool_pb2.AppendTurnsRequest(sequence=7, turn=next(split(cut_short)))

    stream = AppendStream(writer, max_turn_bytes=2 * CHUNK_BYTES)
    taken, refused = [answer async for answer in stream.responses(requests())]
    assert writer.stored == ["t:0:0/0"]
    assert (taken.sequence, taken.status_code) == (6, 0)
    assert (refused.sequence, refused.status_code) == (7, INVALID_ARGUMENT)
    assert "ended before the last chunk of sequence 7: 1048576 bytes" in refused.error
    assert refused_turns() == before + 1


async def test_stream_that_begins_during_a_drain_ends_at_once() -> None:
    """It is not read: its sender, which may send nothing for long, connects elsewhere."""
    stream = AppendStream(Storing(), max_turn_bytes=MAX_TURN_BYTES)
    stream.drain()

    async def silent() -> AsyncIterator[pool_pb2.AppendTurnsRequest]:
        await asyncio.Event().wait()
        yield pool_pb2.AppendTurnsRequest()

    with pytest.raises(Unavailable, match="draining"):
        async with asyncio.timeout(60):
            assert [answer async for answer in stream.responses(silent())] == []
