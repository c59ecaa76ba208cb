"""Answers of a leader wait until its follower has confirmed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from forge.core.errors import Conflict, DeadlineExceeded, Unavailable
from services.pool.replication.ack_gate import AckGate
from services.pool.replication.replica import LeadersReaders, LeadersWriter, Replica
from tests.support.pool.replicas import SHARD
from tests.support.runtime.waiting import settle


@pytest.fixture
def gate() -> AckGate:
    return AckGate("s0", position=5, leads=lambda: True)


async def test_writes_are_refused_before_a_follower_joins(gate):
    """With a hint to retry; stored changes are not acknowledged."""
    with pytest.raises(Unavailable, match="is not accepting writes"):
        gate.admit()
    with pytest.raises(Unavailable):
        await gate.passed(timeout_s=1.0)


async def test_answer_waits_for_its_commit_at_the_follower(gate):
    """It is sent with its position, not before, and later answers still wait."""
    gate.require(5)
    gate.open()
    gate.position = 6
    first = asyncio.create_task(gate.passed(timeout_s=60.0))
    await settle(2)
    gate.position = 7
    second = asyncio.create_task(gate.passed(timeout_s=60.0))
    await settle(2)
    gate.confirm(6)
    await first
    assert not second.done()
    gate.confirm(7)
    await second
    with pytest.raises(DeadlineExceeded):
        gate.position = 8
        await gate.passed(timeout_s=0.0)


async def test_answers_that_wait_for_a_lost_follower_fail(gate):
    """With two required copies they fail and may be sent again; if the leader continues alone,
    recorded as the only one in sync, they are sent."""
    gate.require(5)
    gate.open()
    gate.position = 6
    waiting = asyncio.create_task(gate.passed(timeout_s=60.0))
    await settle(2)
    gate.shut("its follower is away")
    with pytest.raises(Unavailable, match="cannot acknowledge a stored write"):
        await waiting
    with pytest.raises(Unavailable, match="its follower is away"):
        gate.admit()
    gate.require(5)
    waiting = asyncio.create_task(gate.passed(timeout_s=60.0))
    await settle(2)
    gate.go_alone()
    await waiting
    gate.admit()


async def test_deposed_leader_acknowledges_no_write():
    """After the end of its lease, not even alone."""
    gate = AckGate("s0", position=5, leads=lambda: False)
    gate.go_alone()
    with pytest.raises(Unavailable, match="is no longer the leader"):
        gate.admit()
    with pytest.raises(Unavailable, match="is no longer the leader"):
        await gate.passed(timeout_s=1.0)


# What stands before writer and readers


@dataclass
class Held(Replica):
    """Stands in for a Replica that leads, and for its writer."""

    gate: AckGate = field(default_factory=lambda: AckGate(SHARD, position=5, leads=lambda: True))
    outcome: Any = "answer"

    @property
    def leader(self) -> Any:
        return self

    def admit(self) -> None:
        self.gate.admit()

    def check_readable(self) -> None:
        return None

    async def with_repair(self, attempt: Callable[[], Awaitable[Any]]) -> Any:
        return await attempt()

    @contextmanager
    def answering(self) -> Iterator[None]:
        yield

    async def ask(self, message: Any, *, timeout_s: float) -> Any:
        self.gate.position += 1
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome

    async def run(self, read: Callable[[], Any]) -> Any:
        return read()


@pytest.mark.parametrize("outcome", ["answer", Conflict("another was first")])
async def test_answer_is_sent_once_the_follower_has_its_commit(outcome):
    """Also a refusal: it may depend on commits of the leader alone."""
    held = Held(outcome=outcome)
    held.gate.require(5)
    held.gate.open()
    answer = asyncio.create_task(LeadersWriter(held, held).ask("change", timeout_s=60.0))
    await settle()
    assert not answer.done()
    held.gate.confirm(6)
    if isinstance(outcome, Exception):
        with pytest.raises(Conflict):
            await answer
    else:
        assert await answer == "answer"


async def test_reads_wait_for_the_commits_they_may_have_read():
    """An election could undo these commits."""
    held = Held()
    held.gate.require(5)
    held.gate.open()
    held.gate.position = 6
    shown = asyncio.create_task(LeadersReaders(held, held).run(lambda: "seen"))
    await settle()
    assert not shown.done()
    held.gate.confirm(6)
    assert await shown == "seen"
