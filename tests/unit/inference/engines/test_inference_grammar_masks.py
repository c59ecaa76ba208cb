"""Grammars: masks against brute force, answers against their schemas, compiling against abuse."""

from __future__ import annotations

import asyncio
import json
import os.path
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from llguidance import LLParserLimits

from forge.core.errors import FailedPrecondition, InvalidArgument, ResourceExhausted
from forge.core.token_columns import int32_bytes
from services.inference.engines import grammar_masks as grammar_module
from services.inference.engines.base import Grammar, Prompt, Sampling
from services.inference.engines.embedded.model.sampler import draw
from services.inference.engines.grammar_masks import (
    GrammarMatcher,
    Grammars,
    Matcher,
    mask_words,
)
from tests.support.gateway.chat_templates import make_tokenizer, save_model

TOKENIZER = make_tokenizer("chatml")
STOP = TOKENIZER.eos_token_id
VOCABULARY = len(TOKENIZER) + 13
"""A model's vocabulary is often padded: no multiple of 32, more than the tokenizer knows."""


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable ones stand for themselves, the others come after."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    spelt = {chr(byte): byte for byte in printable}
    return spelt | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTES = _byte_alphabet()
PIECES = {
    token: bytes(_BYTES[char] for char in TOKENIZER.convert_ids_to_tokens(token))
    for token in range(len(TOKENIZER))
    if token not in TOKENIZER.all_special_ids
}
"""What each token stands for, also where it is no whole character."""
SAMPLING = Sampling(
    temperature=1.0, top_p=1.0, top_k=0, max_tokens=64, stop_ids=frozenset({STOP}), seed=7
)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_model("chatml", folder)
    return str(folder)


@pytest.fixture(scope="module")
def grammars(model_path: str) -> Grammars:
    return Grammars(model_path, vocabulary=VOCABULARY)


def prompt_of(grammar: Grammar | None, ids: list[int] | None = None, **sampling: Any) -> Prompt:
    return Prompt(
        request_id="r",
        ids=int32_bytes(ids or [1]),
        sampling=replace(SAMPLING, grammar=grammar, **sampling),
    )


def matcher_of(
    grammars: Grammars, grammar: Grammar, sampled: list[int] | None = None
) -> GrammarMatcher:
    matcher = asyncio.run(grammars.matcher(prompt_of(grammar), sampled or []))
    assert isinstance(matcher, GrammarMatcher)
    return matcher


def allowed(matcher: Matcher) -> set[int]:
    mask = np.zeros(mask_words(VOCABULARY), dtype=np.uint32)
    matcher.fill(mask)
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    assert not bits[len(TOKENIZER) :].any()
    return set(bits.nonzero()[0].tolist())


@given(
    words=st.lists(st.text('abo \n{}"é', min_size=1, max_size=6), min_size=1, max_size=8),
    draw_seed=st.integers(0, 2**32),
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_grammar_masks_equal_brute_force(
    grammars: Grammars, words: list[str], draw_seed: int
) -> None:
    """Along a random answer, exactly the first tokens of the language's remaining words are
    allowed, and the stop token exactly after a whole word."""
    language = {word.encode() for word in words}
    matcher = matcher_of(grammars, Grammar(kind="regex", text="|".join(map(re.escape, words))))
    rng = random.Random(draw_seed)
    said = b""
    while True:
        left = [word[len(said) :] for word in language if word.startswith(said)]
        expected = {
            token
            for token, piece in PIECES.items()
            if any(rest.startswith(piece) for rest in left if rest)
        } | ({STOP} if b"" in left else set())
        may = allowed(matcher)
        forced: Any = os.path.commonprefix(left)  # noqa: RUF071
        if may != expected:
            # What the language forces is spelt as the tokenizer spells it, with one token.
            (token,) = may
            assert token in expected
            assert forced.startswith(PIECES[token])
        token = rng.choice(sorted(may))
        if token == STOP:
            return
        matcher.advance(token)
        said += PIECES[token]


_names = st.text("abc_é ", min_size=1, max_size=4)
_scalars = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.builds(lambda n: {"type": "integer", "minimum": -n, "maximum": n}, st.integers(0, 300)),
    st.builds(lambda n: {"type": "string", "maxLength": n}, st.integers(0, 6)),
    st.builds(
        lambda values: {"enum": values},
        st.lists(st.one_of(st.integers(-9, 9), st.text('xyz"\\', max_size=3)), min_size=1),
    ),
    st.just({"type": "string", "pattern": "^[a-c]{2,4}-[0-9]{3}$"}),
    st.just({"type": "string", "format": "date"}),
)


def _object(properties: dict[str, Any], required: list[bool]) -> dict[str, Any]:
    names = [name for name, need in zip(properties, required, strict=False) if need]
    return {
        "type": "object",
        "properties": properties,
        "required": names,
        "additionalProperties": False,
    }


schemas = st.recursive(
    _scalars,
    lambda inner: st.one_of(
        st.builds(
            _object,
            st.dictionaries(_names, inner, max_size=4),
            st.lists(st.booleans(), min_size=4, max_size=4),
        ),
        st.builds(
            lambda items, n: {"type": "array", "items": items, "maxItems": n},
            inner,
            st.integers(0, 3),
        ),
        st.builds(lambda either: {"anyOf": either}, st.lists(inner, min_size=1, max_size=3)),
    ),
    max_leaves=6,
)


def random_answer(matcher: GrammarMatcher, rng: random.Random, *, most: int) -> list[int] | None:
    """Tokens drawn evenly from what is allowed, up to the stop token; None when it takes longer."""
    closing = {token for token, piece in PIECES.items() if piece in (b'"', b"}", b"]")}
    sampled: list[int] = []
    for _ in range(most):
        choices = sorted(allowed(matcher))
        # Evenly drawn white space would never end.
        ends = [token for token in choices if token in closing or token == STOP]
        token = rng.choice(ends if ends and rng.random() < 0.3 else choices)
        if token == STOP:
            return sampled
        matcher.advance(token)
        sampled.append(token)
    return None


@given(schema=schemas, draw_seed=st.integers(0, 2**32))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_drawn_answers_validate_against_their_schema(
    grammars: Grammars, schema: dict[str, Any], draw_seed: int
) -> None:
    """For random schemas, every finished answer is valid JSON, for any draws."""
    grammar = Grammar(kind="json_schema", text=json.dumps(schema))
    sampled = random_answer(matcher_of(grammars, grammar), random.Random(draw_seed), most=400)
    assume(sampled is not None)
    text = b"".join(PIECES[token] for token in sampled or ()).decode()
    jsonschema.validate(json.loads(text), schema)


def test_grammar_continues_from_sampled_tokens(grammars: Grammars) -> None:
    """For any cut between prompt and sampled tokens, the next mask is the same."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    grammar = Grammar(kind="json_schema", text=json.dumps(schema))
    ids = TOKENIZER.encode('{"a": 12', add_special_tokens=False)
    expected = allowed(matcher_of(grammars, grammar, ids))
    for cut in range(len(ids) + 1):
        moved = prompt_of(replace(grammar, matched_tokens=cut), [1, 2, *ids[:cut]])
        matcher = asyncio.run(grammars.matcher(moved, ids[cut:]))
        assert matcher is not None
        assert allowed(matcher) == expected
    wrong = prompt_of(replace(grammar, matched_tokens=2), [1, 2, *ids[1:3]])
    with pytest.raises(InvalidArgument):
        asyncio.run(grammars.matcher(wrong))


def test_rows_without_a_grammar_are_unaffected(grammars: Grammars) -> None:
    """In a mixed batch they get the tokens and log-probs they get alone; rows with a grammar get
    log-probs of the masked distribution, and the share that it left."""
    torch.manual_seed(0)
    logits_RV = 3 * torch.randn(4, VOCABULARY)
    grammar = Grammar(kind="json_schema", text='{"enum": ["yes", "no", 12, 13]}')
    free, held = prompt_of(None, temperature=0.7), prompt_of(grammar, temperature=0.7)
    prompts = [free, held, replace(held, sampling=replace(held.sampling, temperature=0.0)), free]
    matchers = [None, matcher_of(grammars, grammar), matcher_of(grammars, grammar), None]
    drawn = draw(
        logits_RV.clone(),
        prompts,
        positions=[5, 6, 7, 8],
        matchers=matchers,
        answers=[()] * len(prompts),
    )
    alone = draw(
        logits_RV[[0, 3]], [free, free], positions=[5, 8], matchers=[None, None], answers=[(), ()]
    )
    assert [drawn.ids[0], drawn.ids[3]] == alone.ids
    assert [drawn.logprobs[0], drawn.logprobs[3]] == alone.logprobs
    assert set(drawn.allowed) == {1, 2}

    may = torch.zeros(VOCABULARY, dtype=torch.bool)
    may[sorted(allowed(matcher_of(grammars, grammar)))] = True
    probs_V = (logits_RV[1] / 0.7).softmax(-1)
    assert may[drawn.ids[1]]
    assert drawn.allowed[1] == pytest.approx(probs_V[may].sum().log().item(), abs=1e-5)
    # The token's log-prob without the grammar is the sum of both columns.
    whole = drawn.logprobs[1] + drawn.allowed[1]
    assert whole == pytest.approx(probs_V[drawn.ids[1]].log().item(), abs=1e-5)
    assert drawn.ids[2] == logits_RV[2].masked_fill(~may, -torch.inf).argmax()
    assert (drawn.logprobs[2], drawn.allowed[2]) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        (Grammar(kind="json_schema", text="{"), ["not JSON"]),
        (Grammar(kind="json_schema", text="[]"), ["JSON object"]),
        (Grammar(kind="json_schema", text='{"type": "strin"}'), ["strin"]),
        (Grammar(kind="json_schema", text='{"not": {}}'), ["not"]),
        (Grammar(kind="regex", text="("), ["regex"]),
        (Grammar(kind="lark", text="start: other"), ["lark"]),
        (Grammar(kind="regex", text="a" * 200_000), ["131072"]),
        (
            Grammar(
                kind="json_schema",
                text=json.dumps({"properties": {f"k{n}": {} for n in range(501)}}),
            ),
            ["501", "500"],
        ),
    ],
)
def test_grammar_that_does_not_compile_is_refused(
    grammars: Grammars, grammar: Grammar, words: list[str]
) -> None:
    """Before anything is sampled, with the reason; the next request is not affected."""
    for _ in range(2):
        with pytest.raises(InvalidArgument) as refused:
            matcher_of(grammars, grammar)
        assert all(word in str(refused.value) for word in words)
    lenient = replace(grammar, lenient=True)
    if "not" in words:
        assert allowed(matcher_of(grammars, lenient))


def test_grammar_beyond_its_limits_fails_only_its_row(
    model_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lexer with too many states ends that answer with an error, not the batch."""
    monkeypatch.setattr(grammar_module, "LIMITS", LLParserLimits(max_lexer_states=100))
    hostile = Grammar(kind="regex", text="(a|b)*a(a|b){3000}c")
    grammars = Grammars(model_path, vocabulary=VOCABULARY)
    matcher = matcher_of(grammars, hostile)
    matchers = [matcher, None]
    prompts = [prompt_of(hostile), prompt_of(None)]
    rng = random.Random(0)
    for _ in range(1000):
        drawn = draw(
            torch.zeros(2, VOCABULARY),
            prompts,
            positions=[1, 1],
            matchers=matchers,
            answers=[()] * len(prompts),
        )
        assert 0 <= drawn.ids[1] < VOCABULARY
        if drawn.failed:
            assert isinstance(drawn.failed[0], InvalidArgument)
            return
        matcher.advance(rng.choice([token for token in PIECES if PIECES[token] in (b"a", b"b")]))
    pytest.fail("no limit was met")


def test_compiled_grammars_are_kept_within_a_bound(
    model_path: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Equal grammars are compiled once, also at the same time; the least recently used one is
    evicted; too many at once are refused with a retry hint."""
    compiled: list[str] = []
    inner = Grammars._compile_blocking

    def counted(self: Grammars, grammar: Grammar) -> Any:
        compiled.append(grammar.text)
        return inner(self, grammar)

    monkeypatch.setattr(Grammars, "_compile_blocking", counted)
    monkeypatch.setattr(grammar_module, "MAX_COMPILED", 2)
    monkeypatch.setattr(grammar_module, "MAX_COMPILING", 2)

    grammars = Grammars(model_path, vocabulary=VOCABULARY)

    async def ask(*texts: str) -> list[Any]:
        prompts = [prompt_of(Grammar(kind="regex", text=text)) for text in texts]
        return await asyncio.gather(*map(grammars.matcher, prompts), return_exceptions=True)

    assert all(isinstance(one, GrammarMatcher) for one in asyncio.run(ask("x1", "x1", "x2", "x1")))
    asyncio.run(ask("x1"))
    asyncio.run(ask("x3"))
    asyncio.run(ask("x1"))
    asyncio.run(ask("x2"))
    assert compiled == ["x1", "x2", "x3", "x2"]
    *_, last = asyncio.run(ask("y1", "y2", "y3"))
    assert isinstance(last, ResourceExhausted)

    with pytest.raises(FailedPrecondition, match=r"tokenizer\.json"):
        matcher_of(Grammars(str(tmp_path), vocabulary=8), Grammar(kind="regex", text="a"))
