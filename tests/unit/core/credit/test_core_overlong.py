"""Penalties on long answers and masks of cut-off ones, against values worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forge.core.credit.overlong import (
    OverlongRules,
    masked_turns,
    overlong_penalties,
    overlong_penalty,
)
from forge.core.errors import InvalidArgument


@pytest.mark.parametrize(
    ("tokens", "expected"), [(0, 0.0), (75, 0.0), (80, -0.1), (100, -0.5), (101, -0.5)]
)
def test_penalty_rises_over_the_cache_before_the_limit(tokens: int, expected: float) -> None:
    """DAPO, eq. 13, with a full penalty of 1/2: a limit of 100 tokens, a cache of 25."""
    rules = OverlongRules(max_tokens=100, cache_tokens=25, penalty=0.5)
    assert overlong_penalty(tokens, rules) == pytest.approx(expected)


def test_penalty_without_a_cache_is_a_step() -> None:
    """The limit itself is allowed."""
    rules = OverlongRules(max_tokens=100)
    assert [overlong_penalty(tokens, rules) for tokens in (100, 101)] == [0.0, -1.0]


def test_no_penalty_by_default() -> None:
    """For any length."""
    assert overlong_penalty(10**9, OverlongRules()) == 0.0


def test_penalty_of_a_trajectory_belongs_to_its_last_turn() -> None:
    """Its answers are 60, 30 and 20 tokens; each turn by itself is short enough."""
    whole = OverlongRules(max_tokens=110, cache_tokens=20, unit="trajectory")
    lengths = [60, 30, 20]
    assert overlong_penalties(lengths, whole) == [0, 0, -1]
    assert overlong_penalties(lengths, replace(whole, unit="turn")) == [0, 0, 0]
    assert overlong_penalties([], whole) == []


def test_mask_takes_the_turn_or_its_trajectory() -> None:
    """The second of three turns was cut off."""
    cut_off = [False, True, False]
    assert masked_turns(cut_off, OverlongRules()) == [False] * 3
    assert masked_turns(cut_off, OverlongRules(mask="turn")) == cut_off
    assert masked_turns(cut_off, OverlongRules(mask="trajectory")) == [True] * 3
    assert masked_turns([False, False], OverlongRules(mask="trajectory")) == [False] * 2


def test_cache_beyond_the_limit_is_refused() -> None:
    """With name, value and limit."""
    with pytest.raises(InvalidArgument, match=r"cache_tokens = 5 is not .*0 without overlong.max_"):
        OverlongRules(cache_tokens=5).check()
    with pytest.raises(InvalidArgument, match=r"cache_tokens = 5 .*overlong.max_tokens = 4"):
        OverlongRules(max_tokens=4, cache_tokens=5).check()
