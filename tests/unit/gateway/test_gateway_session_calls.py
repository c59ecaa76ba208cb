"""What a gateway knows of the calls of a session: how long they took, and whether they got answers.

A runner asks for both before it says whose failure an attempt was.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from forge.core.errors import ForgeError, InvalidArgument, ResourceExhausted, Unavailable
from forge.runtime.actors.actor_system import ActorSystem
from forge.runtime.security.tokens import Claims
from services.gateway.actors.backlog import Backlog
from services.gateway.sessions import LONG_CALL_S, Session, SessionLimits, Sessions
from tests.support.gateway.limits import admission_of


class Clock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def sessions(clock: Clock) -> Sessions:
    return make_sessions(clock, calls=2)


def make_sessions(clock: Clock, *, calls: int) -> Sessions:
    limits = SessionLimits(
        sessions=9,
        session_bytes=1 << 20,
        idle_s=1.0,
        backlog_bytes=1 << 20,
    )
    unused: Any = None
    return Sessions(
        ActorSystem("test"),
        limits=limits,
        admission=admission_of(calls=calls, calls_per_session=2),
        settings=unused,
        open_stream=unused,
        clock=clock,
    )


@pytest.fixture
def session() -> Session:
    return session_of("t:0:0")


def session_of(trajectory_id: str) -> Session:
    unused: Any = None
    claims = Claims(subject="t", scopes=frozenset({"session"}), trajectory_id=trajectory_id)
    return Session(
        claims=claims,
        actor=unused,
        backlog=Backlog(pool_shard="s0", max_bytes=1 << 20),
        writer=unused,
    )


def end_with(sessions: Sessions, session: Session, error: BaseException) -> None:
    with pytest.raises(type(error)), sessions.count_call(session):
        raise error


def test_overlapping_waits_count_once(sessions: Sessions, session: Session, clock: Clock) -> None:
    """Parallel sub-agents wait no longer than one; pauses do not count."""
    with sessions.count_call(session):
        clock.now_s = 2.0
        with sessions.count_call(session):
            clock.now_s = 5.0
            assert sessions.model_s(session) == 5.0
    clock.now_s = 9.0
    with sessions.count_call(session):
        clock.now_s = 10.0
    assert sessions.model_s(session) == 6.0


@pytest.mark.parametrize("error", [Unavailable("no router"), ResourceExhausted("a full disk")])
def test_failed_call_is_remembered_until_one_is_answered(
    sessions: Sessions, session: Session, error: ForgeError
) -> None:
    """Until another one is answered."""
    end_with(sessions, session, error)
    assert session.unanswered == str(error)
    with sessions.count_call(session):
        pass
    assert session.unanswered == ""


def test_session_with_too_many_calls_leaves_room_for_others(session: Session, clock: Clock) -> None:
    """Calls count from their arrival, so one session cannot take every place; the end of a call
    makes room."""
    sessions = make_sessions(clock, calls=3)
    with sessions.count_call(session):
        with sessions.count_call(session):
            with (
                pytest.raises(ResourceExhausted, match="session t:0:0 has 2 calls in flight"),
                sessions.count_call(session),
            ):
                pass
            with sessions.count_call(session_of("t:0:1")):
                pass
        with sessions.count_call(session):
            pass


def test_refused_admission_is_remembered(sessions: Sessions, session: Session) -> None:
    """An overloaded gateway has not answered."""
    with sessions.count_call(session), sessions.count_call(session):
        end_with(sessions, session, ResourceExhausted("2 calls are in flight"))
        assert "2 calls are in flight" in session.unanswered


def test_refused_request_counts_as_answered(sessions: Sessions, session: Session) -> None:
    """An invalid request is the agent's own fault."""
    end_with(sessions, session, InvalidArgument("the context is too long"))
    assert session.unanswered == ""


@pytest.mark.parametrize("left", [GeneratorExit(), asyncio.CancelledError()])
def test_early_disconnect_is_no_unanswered_call(
    sessions: Sessions, session: Session, clock: Clock, left: BaseException
) -> None:
    """A disconnect after a long wait is."""
    end_with(sessions, session, left)
    assert session.unanswered == ""
    with pytest.raises(type(left)), sessions.count_call(session):
        clock.now_s = LONG_CALL_S
        raise left
    assert session.unanswered == "the agent left a call that took over 30 s"
