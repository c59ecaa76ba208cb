"""What every engine must do with a grammar: hold every answer to it and say by how much."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from forge.core.errors import InvalidArgument
from services.inference.engines.base import Finish, Grammar
from tests.contract import engines
from tests.contract.engines import (
    END,
    SAMPLED,
    Pair,
    prompt_ids,
    reference,
    save_tokenizer,
    text_of,
)
from tests.contract.starts import serving
from tests.support.inference.masked_logprobs import masked_logprobs

pytestmark = pytest.mark.matrix

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "count": {"type": "integer", "minimum": -99, "maximum": 99},
        "kind": {"enum": ["a", "b", None]},
    },
    "required": ["name", "count", "kind"],
    "additionalProperties": False,
}
JSON = Grammar(kind="json_schema", text=json.dumps(SCHEMA))
HELD = replace(SAMPLED, grammar=JSON, stop_ids=frozenset({END}), max_tokens=200)


@pytest.fixture(params=engines.able("grammars"))
async def pair(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Pair]:
    """With weights and a tokenizer."""
    save_tokenizer(tmp_path)
    async with serving(engines.ENGINES[request.param], tmp_path) as started:
        yield started


async def test_answers_of_random_weights_satisfy_the_schema(pair: Pair, tmp_path: Path) -> None:
    """For every seed, and they end with the stop token; log-probs are those of the masked
    distribution, with the recorded share."""
    ids = prompt_ids(20)
    for seed, temperature in ((1, 1.0), (2, 1.0), (3, 0.6)):
        answer = await pair.sample(ids, replace(HELD, seed=seed, temperature=temperature))
        assert answer.finish is Finish.STOP
        assert answer.ids[-1] == END
        jsonschema.validate(json.loads(text_of(answer.ids[:-1])), SCHEMA)
        logprobs, allowed = await masked_logprobs(
            reference("qwen3"), tmp_path, ids, answer.ids,
            grammar=JSON, stop_ids=HELD.stop_ids, temperature=temperature,
        )  # fmt: skip
        assert answer.logprobs == pytest.approx(logprobs, abs=1e-4)
        if pair.capabilities.shares:
            assert answer.allowed == pytest.approx(allowed, abs=1e-4)


async def test_grammar_affects_no_other_request(pair: Pair) -> None:
    """Requests without one, in the same batch, are answered as alone."""
    prompts = [prompt_ids(9 + n, seed=n) for n in range(4)]
    free = [replace(SAMPLED, max_tokens=40, seed=n) for n in range(4)]
    alone = [await pair.sample(*request) for request in zip(prompts, free, strict=True)]
    held = [pair.sample(ids, replace(HELD, seed=7, max_tokens=450)) for ids in prompts]
    mixed = await asyncio.gather(*map(pair.sample, prompts, free), *held)
    assert [answer.ids for answer in mixed[:4]] == [answer.ids for answer in alone]
    assert not any(answer.allowed for answer in mixed[:4])
    for answer in mixed[4:]:
        jsonschema.validate(json.loads(text_of(answer.ids[:-1])), SCHEMA)


async def test_another_worker_continues_behind_matched_tokens(pair: Pair, tmp_path: Path) -> None:
    """Prompt and half an answer, given as matched, continue like the uninterrupted answer, with
    other draws where they do not depend on the position alone."""
    engines.require("grammar" in pair.capabilities.resumes, "grammars of moved requests")
    ids = prompt_ids(12)
    whole = await pair.sample(ids, replace(HELD, seed=5))
    for cut in (1, 4, len(whole.ids) - 2):
        grammar = replace(JSON, matched_tokens=cut)
        rest = await pair.sample(ids + whole.ids[:cut], replace(HELD, seed=5, grammar=grammar))
        answer = whole.ids[:cut] + rest.ids
        if pair.capabilities.draws == "positional":
            assert answer == whole.ids
        jsonschema.validate(json.loads(text_of(answer[:-1])), SCHEMA)
        logprobs, allowed = await masked_logprobs(
            reference("qwen3"), tmp_path, ids, answer,
            grammar=JSON, stop_ids=HELD.stop_ids, temperature=1.0,
        )  # fmt: skip
        assert rest.logprobs == pytest.approx(logprobs[cut:], abs=1e-4)
        assert rest.allowed == pytest.approx(allowed[cut:], abs=1e-4)


async def test_answer_under_a_grammar_ends_at_max_tokens(pair: Pair) -> None:
    """In the middle, with that finish reason."""
    answer = await pair.sample(prompt_ids(5), replace(HELD, max_tokens=4))
    assert len(answer.ids) == 4
    assert answer.finish is Finish.LENGTH


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar(kind="json_schema", text='{"type": "strin"}'),
        Grammar(kind="regex", text="("),
        replace(JSON, matched_tokens=1),
    ],
)
async def test_invalid_grammar_is_refused_at_once(pair: Pair, grammar: Any) -> None:
    """Before the prefill: INVALID_ARGUMENT, and no memory is held."""
    with pytest.raises(InvalidArgument):
        await pair.sample([*prompt_ids(4), 9], replace(HELD, grammar=grammar))
    await pair.prefill.idle()
