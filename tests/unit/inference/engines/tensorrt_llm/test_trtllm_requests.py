"""Tests: parameters of a request in the library's terms, and its answers."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from forge.core.errors import InvalidArgument
from services.inference.engines.base import Finish, Sampling
from services.inference.engines.tensorrt_llm.library.surface import TARGET
from services.inference.engines.tensorrt_llm.requests import (
    CAPABILITIES,
    WrongAnswer,
    capabilities_of,
    check_temperature,
    read_finish,
    read_tokens,
    sampling_params,
)
from tests.support.inference.tensorrt_llm import OLD, library
from tests.support.inference.tensorrt_llm_fake.executor.result import Logprob
from tests.support.inference.tensorrt_llm_fake.sampling_params import LogprobMode

SAMPLED = Sampling(
    temperature=1.0, top_p=1.0, top_k=0, max_tokens=9, stop_ids=frozenset({5, 3}), seed=1
)
GREEDY = replace(SAMPLED, temperature=0.0)


def test_sampling_is_mapped_whole() -> None:
    """Temperature and cuts, stop ids as part of the answer, a seed, the sampled distribution."""
    sampling = replace(SAMPLED, temperature=0.7, top_p=0.9, top_k=4, min_p=0.1)
    made = sampling_params(library(), sampling, max_tokens=7, leg=0)
    assert (made.temperature, made.top_p, made.top_k, made.min_p) == (0.7, 0.9, 4, 0.1)
    assert (made.max_tokens, made.end_id, made.stop_token_ids) == (7, -1, [3, 5])
    assert made.include_stop_str_in_output
    assert (made.seed, made.logprobs, made.logprobs_mode) == (1, 0, LogprobMode.PROCESSED)
    assert not made.detokenize


def test_greedy_has_no_temperature_and_the_models_log_probs() -> None:
    """The library is greedy without any of the three; its processed log-prob would be 0."""
    made = sampling_params(library(), GREEDY, max_tokens=7, leg=0)
    assert made.is_greedy
    assert made.logprobs_mode is LogprobMode.RAW


def test_each_leg_has_an_object_and_a_seed_of_its_own() -> None:
    """A continuation must not repeat the draws of the beginning; seeds fit the library's type."""
    largest = replace(SAMPLED, seed=(1 << 64) - 1)
    made = [sampling_params(library(), largest, max_tokens=7, leg=leg) for leg in range(3)]
    assert len({id(one) for one in made}) == 3
    assert len({one.seed for one in made}) == 3
    assert all(0 <= one.seed < 1 << 63 for one in made)


def test_old_version_asks_for_one_logprob() -> None:
    """There 0 disables them."""
    made = sampling_params(library(OLD), SAMPLED, max_tokens=7, leg=0)
    assert (made.logprobs, made.logprobs_mode) == (1, None)


def test_raw_logprobs_allow_no_other_temperature() -> None:
    """1.2.1 returns log-probs of the model's distribution: only that one may be sampled."""
    cold = replace(SAMPLED, temperature=0.7)
    for fitting in (SAMPLED, GREEDY):
        check_temperature(library(OLD), fitting)
    check_temperature(library(), cold)
    with pytest.raises(
        InvalidArgument, match=r"the engine tensorrt_llm cannot serve .*temperature = 0.7"
    ):
        check_temperature(library(OLD), cold)


def test_abilities_follow_from_the_version() -> None:
    """1.2.1 has one role, drains, and has no cuts."""
    old, new = (
        capabilities_of(library(version).features, transfers=version == TARGET)
        for version in (OLD, TARGET)
    )
    assert old.roles == frozenset({"both"})
    assert old.hand_offs == frozenset()
    assert (old.update, old.cuts) == ("drain", False)
    assert new == CAPABILITIES


def output(**changed: Any) -> Any:
    entries = [{9: Logprob(-0.1, 1), 4: Logprob(-2.0, 2)}, {7: Logprob(-0.5, 1)}]
    defaults = {"token_ids": [4, 7], "logprobs": entries, "finish_reason": None}
    return SimpleNamespace(**(defaults | changed))


def test_logprob_is_read_by_token() -> None:
    """The likeliest token stands first and is not the sampled one."""
    found = read_tokens(output(), start=0, sampling=replace(SAMPLED, top_logprobs=2), version=3)
    assert found.ids == [4, 7]
    assert found.logprobs == [-2.0, -0.5]
    assert found.versions == [3, 3]
    assert found.top == [((9, -0.1), (4, -2.0)), ((7, -0.5),)]
    assert read_tokens(output(), start=1, sampling=SAMPLED, version=3).ids == [7]


@pytest.mark.parametrize(
    "wrong",
    [
        {"logprobs": []},
        {"logprobs": None},
        {"logprobs": [{9: Logprob(-0.1)}, {7: Logprob(-0.5)}]},
        {"logprobs": [{4: Logprob(float("nan"))}, {7: Logprob(-0.5)}]},
    ],
)
def test_token_without_its_logprob_is_an_error(wrong: dict[str, Any]) -> None:
    """No log-prob of another token stands in."""
    with pytest.raises(WrongAnswer, match="4"):
        read_tokens(output(**wrong), start=0, sampling=SAMPLED, version=3)


def test_greedy_token_is_certain() -> None:
    """Its log-prob is that of the sampled distribution, 0; the likeliest ones have the model's."""
    found = read_tokens(output(), start=0, sampling=replace(GREEDY, top_logprobs=1), version=3)
    assert found.logprobs == [0.0, 0.0]
    assert found.top == [((9, -0.1),), ((7, -0.5),)]


def test_finish_is_typed() -> None:
    """An unknown reason is an error, an abort no finish."""
    reasons = [None, "cancelled", "stop", "length"]
    found = [read_finish(output(finish_reason=reason)) for reason in reasons]
    assert found == [None, None, Finish.STOP, Finish.LENGTH]
    with pytest.raises(WrongAnswer, match="timeout"):
        read_finish(output(finish_reason="timeout"))
