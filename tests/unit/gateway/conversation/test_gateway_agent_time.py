"""The time of the agent between calls, and the completion time that comes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge.core.credit.completion_time import TurnTime, completion_s
from forge.v1 import common_pb2
from services.gateway.conversation.agent_time import AgentTime, Begun, Moment

RATE = 10.0
WALL_S = 1e6


def moment(at_s: float) -> Moment:
    return Moment(at_s=at_s, unix_s=WALL_S + at_s)


@dataclass
class Session:
    """Turns as they are recorded, of calls at given times."""

    time: AgentTime = field(default_factory=AgentTime)
    turns: list[common_pb2.Turn] = field(default_factory=list)

    def begin(self, at_s: float) -> Begun:
        return self.time.began(moment(at_s), turns=len(self.turns))

    def end(self, begun: Begun | None, start_s: float, end_s: float, tokens: int = 0) -> None:
        turn = common_pb2.Turn(turn_index=len(self.turns))
        turn.sampled.ids = b"\0" * 4 * tokens
        self.time.record(turn, begun, arrived=moment(start_s), now_s=end_s)
        self.turns.append(turn)

    def call(self, start_s: float, end_s: float, tokens: int = 0) -> None:
        self.end(self.begin(start_s), start_s, end_s, tokens)

    def fail(self, start_s: float) -> None:
        self.time.failed(self.begin(start_s), turns=len(self.turns))

    def completion_s(self, end_s: float) -> float:
        self.time.close(moment(end_s))
        assert self.time.closing_s is not None
        turns = [
            TurnTime(
                sampled_tokens=len(turn.sampled.ids) // 4,
                agent_s=turn.timings.agent_s,
                turns_before=turn.turns_before,
            )
            for turn in self.turns
        ]
        return completion_s(turns, closing_agent_s=self.time.closing_s, tokens_per_s=RATE)


@dataclass(frozen=True)
class Stage:
    """Calls made together, after a tool and when all earlier ones are answered."""

    tool_s: float
    tokens: Sequence[int]


stages = st.lists(
    st.builds(
        Stage, st.floats(0, 100), st.lists(st.integers(0, 500), min_size=1, max_size=4)
    ),
    min_size=1,
    max_size=5,
)  # fmt: skip


def run(program: Sequence[Stage], delays_s: Sequence[float]) -> float:
    """The completion time when the engine takes so much longer for each call than its tokens."""
    session, now_s, delay_s = Session(), 50.0, iter(delays_s)
    for stage in program:
        start_s = now_s + stage.tool_s
        begun = [session.begin(start_s) for _ in stage.tokens]
        ends = [(start_s + tokens / RATE + next(delay_s), tokens) for tokens in stage.tokens]
        for one, (end_s, tokens) in zip(begun, sorted(ends), strict=True):
            session.end(one, start_s, end_s, tokens)
        now_s = max(end_s for end_s, _ in ends)
    return session.completion_s(now_s)


@given(stages, st.data())
def test_completion_time_does_not_depend_on_the_engine(
    program: list[Stage], data: st.DataObject
) -> None:
    """For any speed and order of answers: tools, and the longest of parallel calls."""
    calls = sum(len(stage.tokens) for stage in program)
    delays_s = data.draw(st.lists(st.floats(0, 1000), min_size=calls, max_size=calls))
    # What comes before the first request is not known to the session.
    expected = sum(stage.tool_s for stage in program[1:])
    expected += sum(max(stage.tokens) / RATE for stage in program)
    assert run(program, delays_s) == pytest.approx(expected, abs=1e-6)


def test_completion_time_without_contention_is_elapsed_time() -> None:
    """Calls that overlap in any way, at the nominal rate: from the first request to the end."""
    session = Session()
    background = session.begin(0.0)
    session.call(1.0, 3.0, tokens=20)
    session.call(8.0, 9.0, tokens=10)
    session.end(background, 0.0, 12.0, tokens=120)
    session.call(13.0, 14.0, tokens=10)
    assert session.completion_s(20.0) == pytest.approx(20.0)


def test_wait_after_a_failed_call_is_no_own_time() -> None:
    """Its tool took 2 s; then the cluster had no answer for 60 s."""
    session = Session()
    session.call(0.0, 1.0)
    session.fail(3.0)
    session.fail(30.0)
    session.call(63.0, 64.0)
    assert session.turns[1].timings.agent_s == 2.0
    session.fail(65.0)
    assert session.completion_s(99.0) == pytest.approx(3.0)


def test_failed_call_does_not_change_the_time_of_others() -> None:
    """The turn that ended meanwhile is the latest end."""
    session = Session()
    session.call(0.0, 1.0)
    failing = session.begin(2.0)
    session.call(2.0, 5.0)
    session.time.failed(failing, turns=len(session.turns))
    session.call(9.0, 10.0)
    assert [turn.timings.agent_s for turn in session.turns] == [0.0, 1.0, 4.0]


def test_rebuilt_session_uses_the_wall_clock() -> None:
    """Another gateway has another monotonic clock; a clock that is behind counts as no time."""
    first = Session()
    first.call(0.0, 10.0)
    for unix_s, agent_s in ((WALL_S + 14.0, 4.0), (WALL_S + 9.0, 0.0)):
        moved = Session(turns=list(first.turns))
        moved.time.rebuilt(first.turns[-1])
        begun = moved.time.began(Moment(at_s=7e5, unix_s=unix_s), turns=1)
        assert begun == Begun(turns_before=1, agent_s=agent_s)


def test_later_turn_of_another_gateway_is_the_latest_end() -> None:
    """The own monotonic clock is used while the latest turn is its own."""
    session = Session()
    session.call(0.0, 10.0)
    session.time.rebuilt(session.turns[-1])
    assert session.begin(12.5).agent_s == 2.5
    session.time.rebuilt(common_pb2.Turn(ended_unix_s=WALL_S + 11.0))
    assert session.begin(12.5).agent_s == 1.5


def test_turn_after_one_without_a_recorded_end_has_no_time() -> None:
    """Records of earlier versions: no completion time rather than a wrong one."""
    session = Session(turns=[common_pb2.Turn()])
    session.time.rebuilt(session.turns[-1])
    session.call(5.0, 6.0)
    assert not session.turns[1].HasField("turns_before")
    session.call(7.0, 8.0)
    assert session.turns[2].turns_before == 2


def test_call_with_an_unknown_begin_has_no_time() -> None:
    """Its session crashed meanwhile; its end still counts for later calls."""
    session = Session()
    session.end(None, 0.0, 4.0)
    assert not session.turns[0].HasField("turns_before")
    assert session.begin(6.0).agent_s == 2.0


def test_repeated_close_keeps_the_first_end_of_the_agent() -> None:
    """The first one has the end of the agent."""
    session = Session()
    assert session.time.closing_s is None
    session.call(0.0, 1.0)
    session.time.close(moment(3.0))
    session.time.close(moment(90.0))
    assert session.time.closing_s == 2.0
