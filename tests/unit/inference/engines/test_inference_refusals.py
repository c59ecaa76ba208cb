"""Requests that an engine cannot serve: refused with its name, before it sees them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forge.core.errors import InvalidArgument
from services.inference.engines.base import Grammar, Prompt, Reweighting, Sampling
from services.inference.engines.capabilities import Capabilities
from services.inference.engines.embedded.roles.wiring import CAPABILITIES as EMBEDDED
from services.inference.engines.refusals import check_request

PLAIN = Sampling(temperature=1.0, top_p=1.0, top_k=0, max_tokens=9, stop_ids=frozenset({0}), seed=1)
LEAST = Capabilities(
    engine="least", roles=frozenset({"both"}), update="in_flight", draws="positional"
)
STARTING = replace(
    LEAST,
    engine="starting",
    penalties=True,
    grammars=frozenset({"regex"}),
    top_logprobs=3,
)
"""Has no state of an answer that began elsewhere."""
REGEX = Grammar(kind="regex", text="a")


def prompt(sampling: Sampling) -> Prompt:
    return Prompt(request_id="r", ids=bytes(40), sampling=sampling)


@pytest.mark.parametrize(
    ("able", "sampling", "words"),
    [
        (LEAST, replace(PLAIN, top_p=0.9), "least cannot serve .*top_p = 0.9"),
        (LEAST, replace(PLAIN, top_k=5), "top_k = 5"),
        (LEAST, replace(PLAIN, min_p=0.1), "min_p = 0.1"),
        (LEAST, replace(PLAIN, min_tokens=2), "min_tokens = 2"),
        (LEAST, replace(PLAIN, top_logprobs=1), "top_logprobs = 1: it has 0"),
        (LEAST, replace(PLAIN, grammar=REGEX), "grammar.regex: its kinds are none"),
        (LEAST, replace(PLAIN, reweighting=Reweighting(bias=((1, 2.0),))), "logit_bias"),
        (STARTING, replace(PLAIN, top_logprobs=4), "starting .* = 4: it has 3"),
        (STARTING, replace(PLAIN, grammar=replace(REGEX, kind="lark")), "kinds are regex"),
        (STARTING, replace(PLAIN, grammar=replace(REGEX, matched_tokens=1)), "matched_tokens = 1"),
        (
            STARTING,
            replace(PLAIN, reweighting=Reweighting(presence=1.0, answered_tokens=2)),
            "answered_tokens = 2",
        ),
    ],
)
def test_undeclared_ability_is_refused_with_the_engine(
    able: Capabilities, sampling: Sampling, words: str
) -> None:
    """The error names engine, field and value."""
    with pytest.raises(InvalidArgument, match=words):
        check_request(prompt(sampling), able)


def test_all_refused_parts_of_a_request_are_named() -> None:
    """One error for all of them."""
    with pytest.raises(InvalidArgument, match=r"top_p = 0\.5.*; sampling\.min_tokens = 1"):
        check_request(prompt(replace(PLAIN, top_p=0.5, min_tokens=1)), LEAST)


def test_declared_abilities_are_served() -> None:
    """A plain request by every engine; a request for everything by the embedded one; repetition
    counts the prompt, so an answer that began elsewhere needs no state for it."""
    for able in (LEAST, STARTING, EMBEDDED):
        check_request(prompt(PLAIN), able)
    check_request(prompt(replace(PLAIN, grammar=REGEX, top_logprobs=3)), STARTING)
    moved = Reweighting(repetition=1.2, answered_tokens=2)
    check_request(prompt(replace(PLAIN, reweighting=moved)), STARTING)
    everything = replace(
        PLAIN,
        top_p=0.5,
        top_k=3,
        min_p=0.1,
        min_tokens=2,
        top_logprobs=20,
        grammar=replace(REGEX, kind="lark", matched_tokens=2),
        reweighting=Reweighting(presence=1.0, frequency=1.0, answered_tokens=2),
    )
    check_request(prompt(everything), EMBEDDED)


def test_capabilities_are_one_line_for_the_log() -> None:
    """Only what it has."""
    assert STARTING.described() == (
        "roles=both logprobs=sampled update=in_flight draws=positional penalties grammars=regex "
        "top_logprobs=3"
    )
