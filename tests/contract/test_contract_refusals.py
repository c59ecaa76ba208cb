"""Abilities that an engine does not declare: each is refused, none is ignored."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from forge.core.errors import UnsupportedByEngines
from services.inference.engines.base import Grammar, Reweighting
from tests.contract import engines
from tests.contract.engines import SAMPLED, Pair, prompt_ids
from tests.contract.starts import serving
from tests.support.suite.matrix import usual

ASKED = {
    "cuts": replace(SAMPLED, top_k=3),
    "min_tokens": replace(SAMPLED, min_tokens=2),
    "penalties": replace(SAMPLED, reweighting=Reweighting(presence=0.5)),
    "grammars": replace(SAMPLED, grammar=Grammar(kind="regex", text="[0-9]")),
    "top_logprobs": replace(SAMPLED, top_logprobs=1),
}
"""A request for each ability that a request can ask for."""


@pytest.fixture(params=usual(engines.ENGINES, "embedded"))
async def pair(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Pair]:
    async with serving(engines.ENGINES[request.param], tmp_path) as started:
        yield started


async def test_undeclared_ability_is_refused_by_name(pair: Pair) -> None:
    """The error names the engine and what it lacks. Nothing is served without a part of what the
    request asks."""
    able = pair.capabilities
    asked = {name: one for name, one in ASKED.items() if not getattr(able, name)}
    beyond = replace(SAMPLED, top_logprobs=able.top_logprobs + 1)
    words = {"cuts": "top_k = 3", "penalties": "penalties", "grammars": "grammar.regex"}
    for name, sampling in {**asked, "more top_logprobs": beyond}.items():
        lacking = words.get(name, name.removeprefix("more "))
        with pytest.raises(
            UnsupportedByEngines, match=f"the engine {able.engine} cannot serve .*{lacking}"
        ):
            await pair.sample(prompt_ids(9), sampling)
    assert pair.decode.status().running == 0
    assert len((await pair.sample(prompt_ids(9))).ids) == 16
