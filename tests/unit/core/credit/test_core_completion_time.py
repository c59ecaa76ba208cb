"""The critical path of a rollout, against values worked out by hand and by properties."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge.core.credit.completion_time import (
    BASELINE_ROLLOUTS,
    MeasuredBatch,
    TurnTime,
    completion_s,
    measured_baseline_s,
)
from forge.core.errors import InvalidArgument

RATE = 10.0

turn_times = st.builds(
    TurnTime,
    sampled_tokens=st.integers(0, 1000),
    agent_s=st.floats(0, 1000),
    turns_before=st.just(0),
)


@st.composite
def rollouts(draw: st.DrawFn) -> list[TurnTime]:
    turns = draw(st.lists(turn_times, max_size=12))
    return [
        replace(turn, turns_before=draw(st.integers(0, index))) for index, turn in enumerate(turns)
    ]


def turn(tokens: int, agent_s: float = 0.0, before: int = 0) -> TurnTime:
    return TurnTime(sampled_tokens=tokens, agent_s=agent_s, turns_before=before)


def took(*turns: TurnTime, closing_agent_s: float = 0.0) -> float:
    return completion_s(turns, closing_agent_s=closing_agent_s, tokens_per_s=RATE)


def test_completion_time_adds_up_tokens_tools_and_the_end() -> None:
    """1 s of tokens, 3 s of tools, 2 s of tokens, 0.5 s until the agent ends."""
    assert took(turn(10), turn(20, 3.0, before=1), closing_agent_s=0.5) == 6.5


def test_parallel_turns_count_once() -> None:
    """Two sub-agents of 2 s and 5 s between a plan of 1 s and a summary of 1 s: 7 s, not 9."""
    plan, summary = turn(10), turn(10, before=3)
    assert took(plan, turn(20, before=1), turn(50, before=1), summary) == 7.0
    assert took(plan, turn(20, before=1), turn(50, before=2), summary) == 9.0


def test_completion_time_is_the_longest_path() -> None:
    """The engine answered the long turn first; the turns after both begin after the long one."""
    assert took(turn(50), turn(20), turn(10, before=2)) == 6.0


@given(rollouts(), st.floats(0, 1000))
def test_completion_time_is_at_least_each_of_its_parts(
    turns: list[TurnTime], closing_s: float
) -> None:
    """So it is never negative, and never shorter than a tool call."""
    found = took(*turns, closing_agent_s=closing_s)
    for one in turns:
        assert found >= one.agent_s + one.sampled_tokens / RATE + closing_s - 1e-6
    assert found >= closing_s


@given(rollouts())
def test_parallel_turns_take_no_longer_than_the_same_in_sequence(turns: list[TurnTime]) -> None:
    """In sequence the completion time is the sum of all parts."""
    sequence = [replace(one, turns_before=index) for index, one in enumerate(turns)]
    total = math.fsum(one.agent_s + one.sampled_tokens / RATE for one in turns)
    assert took(*sequence) == pytest.approx(total)
    assert took(*turns) <= took(*sequence) + 1e-6


@given(rollouts(), st.data(), st.floats(0.1, 100))
def test_longer_tool_time_never_shortens_completion_time(
    turns: list[TurnTime], data: st.DataObject, more_s: float
) -> None:
    """In a sequence all tool time counts."""
    if not turns:
        return
    at = data.draw(st.integers(0, len(turns) - 1))
    slower = [
        replace(one, agent_s=one.agent_s + more_s) if index == at else one
        for index, one in enumerate(turns)
    ]
    assert took(*slower) >= took(*turns)
    sequence, slow_sequence = (
        [replace(one, turns_before=index) for index, one in enumerate(some)]
        for some in (turns, slower)
    )
    assert took(*slow_sequence) - took(*sequence) == pytest.approx(more_s, abs=1e-6)


@pytest.mark.parametrize(
    ("turns", "closing_s", "named"),
    [
        ([turn(1, -1.0)], 0.0, "agent_s of turn 0"),
        ([turn(1, math.nan)], 0.0, "agent_s of turn 0"),
        ([turn(1, before=1)], 0.0, "turns_before 1"),
        ([turn(1)], math.inf, "closing_agent_s"),
    ],
)
def test_invalid_times_are_refused(turns: list[TurnTime], closing_s: float, named: str) -> None:
    """The error names the field and the value."""
    with pytest.raises(InvalidArgument, match=named):
        took(*turns, closing_agent_s=closing_s)


def test_nominal_rate_of_0_is_refused() -> None:
    """A nominal rate of 0 would make every rollout endless."""
    with pytest.raises(InvalidArgument, match="tokens_per_s is 0"):
        completion_s([], closing_agent_s=0, tokens_per_s=0)


def test_speed_baseline_is_the_median_of_measured_times() -> None:
    """It is unknown before enough rollouts are measured; batches without any do not count."""
    few = [MeasuredBatch(rollouts=BASELINE_ROLLOUTS - 1, median_s=4.0)]
    assert measured_baseline_s([]) is None
    assert measured_baseline_s(few) is None
    nothing = MeasuredBatch(rollouts=0, median_s=0.0)
    more = [MeasuredBatch(rollouts=1, median_s=value) for value in (2.0, 90.0)]
    assert measured_baseline_s([*few, nothing, *more]) == 4.0
    assert measured_baseline_s([MeasuredBatch(rollouts=99, median_s=0.0)]) is None
