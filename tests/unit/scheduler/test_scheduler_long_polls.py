"""Long polls without polling, and progress over the last rollouts."""

from __future__ import annotations

import pytest

from forge.core.errors import ResourceExhausted, Unavailable
from services.scheduler import long_polls
from services.scheduler.long_polls import LongPolls, new_answer
from services.scheduler.state.domain_progress import RECENT_ROLLOUTS, DomainProgress


async def test_longest_waiting_call_is_served_first() -> None:
    """A free group or batch goes to the oldest call."""
    stock: list[str] = []
    room = LongPolls[str, str](lambda name: f"{name}:{stock.pop()}" if stock else None, kind=len)
    first, second = room.enter("first", new_answer()), room.enter("second", new_answer())
    stock.append("x")
    room.serve()
    assert first.result() == "first:x"
    assert not second.done()


async def test_small_request_is_served_while_a_large_one_waits() -> None:
    """A small batch is available earlier than a large one."""
    room = LongPolls[int, int](lambda size: size if size <= 2 else None, kind=int)
    large, small = room.enter(8, new_answer()), room.enter(2, new_answer())
    room.serve()
    assert small.result() == 2
    assert not large.done()


async def test_cancelled_call_is_passed_over() -> None:
    """It gets no batch."""
    room = LongPolls[str, str](lambda name: name, kind=len)
    gone, present = room.enter("gone", new_answer()), room.enter("present", new_answer())
    gone.cancel()
    room.serve()
    assert present.result() == "present"


async def test_closing_answers_every_waiting_call() -> None:
    """Closing answers all."""
    room = LongPolls[str, str](lambda _: None, kind=len)
    future = room.enter("a", new_answer())
    room.close(Unavailable("over"))
    with pytest.raises(Unavailable, match="over"):
        await future


async def test_waiting_calls_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Overload is refused; cancelled calls do not count."""
    monkeypatch.setattr(long_polls, "MAX_WAITING", 2)
    room = LongPolls[str, str](lambda _: None, kind=len)
    first = room.enter("a", new_answer())
    room.enter("b", new_answer())
    with pytest.raises(ResourceExhausted, match="2 calls are waiting"):
        room.enter("c", new_answer())
    first.cancel()
    room.enter("c", new_answer())


def test_recent_reward_is_the_mean_of_the_last_sealed_rollouts() -> None:
    """A new leader counts them in any order, with the same mean."""
    progress = DomainProgress()
    for second in reversed(range(2 * RECENT_ROLLOUTS)):
        old = second < RECENT_ROLLOUTS
        progress.record("code", sealed_unix_s=second, outcome=0.0 if old else 1.0)
    assert progress.recent_reward("code") == 1.0
    assert progress.completed("code") == 2 * RECENT_ROLLOUTS
    assert progress.recent_reward("qa") == 0.0
