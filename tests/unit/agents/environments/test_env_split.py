"""Which tasks are held out: a function of the prompt, the same in every process and release."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge.agents.environments import DOMAINS
from forge.agents.environments.reasoning import ReasoningDomain, ReasoningEpisode
from forge.agents.environments.split import (
    HELD_OUT_ONE_IN,
    held_out_payloads,
    is_held_out,
    prompt_key,
    training_payload,
)
from forge.core.errors import FailedPrecondition

SUM = {"name": "Tom", "goods": "figs", "start": 4, "changes": [2, -2, 1]}


class OneTask(ReasoningDomain):
    """A domain whose every draw is the same task."""

    def __init__(self, **changed: Any) -> None:
        self.payload = SUM | changed

    def generate(self, rng: Random) -> dict[str, Any]:
        return self.payload

    def episode(self, payload: Mapping[str, Any]) -> ReasoningEpisode:
        return ReasoningEpisode(payload)


def test_prompt_stays_training_or_held_out() -> None:
    """A release that moved prompts would train a resumed run on held-out tasks."""
    sides = [is_held_out(f"prompt {number}") for number in range(12)]
    assert sides == [number in (1, 2, 10) for number in range(12)]


def test_payload_fields_without_a_message_do_not_move_a_task() -> None:
    """Two payloads with the same messages are the same task."""
    domain = ReasoningDomain()
    assert prompt_key(domain, SUM) == prompt_key(domain, SUM | {"note": "hidden"})


@given(seed=st.integers(0, 2**63), name=st.sampled_from(["reasoning", "qa", "code", "general"]))
def test_generators_produce_only_training_or_held_out_tasks(seed: int, name: str) -> None:
    """For any seed: a training payload is never held out, a held-out one always is."""
    domain = DOMAINS[name]
    assert not is_held_out(prompt_key(domain, training_payload(domain, Random(seed))))
    for payload in islice(held_out_payloads(domain, Random(seed)), 3):
        assert is_held_out(prompt_key(domain, payload))


def test_about_one_prompt_in_four_is_held_out() -> None:
    """The digest is uniform over prompts that look alike."""
    share = sum(is_held_out(f"prompt {number}") for number in range(4000)) / 4000
    assert abs(share - 1 / HELD_OUT_ONE_IN) < 0.03


def test_domain_without_training_tasks_is_an_error() -> None:
    """The error names the domain; a domain without held-out tasks has an empty set."""
    tasks = [OneTask(start=start, changes=[1, 1]) for start in range(8)]
    sides = [is_held_out(prompt_key(one, one.payload)) for one in tasks]
    held, trained = tasks[sides.index(True)], tasks[sides.index(False)]
    with pytest.raises(FailedPrecondition, match=r"'reasoning'.*no training task"):
        training_payload(held, Random(0))
    assert len(list(held_out_payloads(held, Random(0)))) == 1
    assert list(held_out_payloads(trained, Random(0))) == []
