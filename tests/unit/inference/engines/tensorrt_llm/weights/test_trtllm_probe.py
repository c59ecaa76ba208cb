"""Tests: log-probs of a prompt are found by token, wherever the library's list begins."""

from __future__ import annotations

from typing import Any

import pytest

from services.inference.engines.tensorrt_llm.weights.probe import aligned
from tests.support.inference.tensorrt_llm_fake.executor.result import Logprob

ENTRIES = [{7: Logprob(-1.0)}, {8: Logprob(-2.0), 3: Logprob(-0.1)}, {9: Logprob(-3.0)}]


@pytest.mark.parametrize("before", [[], [None], [{4: Logprob(-9.0)}]])
@pytest.mark.parametrize("behind", [[], [{1: Logprob(-9.0)}]])
def test_logprobs_are_found_by_token(before: list[Any], behind: list[Any]) -> None:
    """With an entry for the first token or none, with one for the sampled token or none."""
    assert aligned([*before, *ENTRIES, *behind], [7, 8, 9]) == [-1.0, -2.0, -3.0]


@pytest.mark.parametrize("entries", [None, [], ENTRIES[:2], [*ENTRIES[:2], None]])
def test_missing_logprobs_are_no_numbers(entries: list[Any] | None) -> None:
    """A version that returns none is not taken for wrong weights."""
    assert aligned(entries, [7, 8, 9]) is None
