"""Fuzz targets: parsers of a model's answer. A model may write any text."""

from __future__ import annotations

import json
from functools import cache
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from forge.core.formats import CallDelta, ParsedAnswer, Parser, PlainParser, get_format
from forge.core.formats.registry import BUILT_IN, BUILT_IN_REASONING, SAMPLE_TOOLS
from forge.core.token_columns import float32_bytes, int32_bytes
from forge.v1 import common_pb2
from services.gateway.turns.answer_parser import AnswerParser
from tests.support.core.format_samples import all_marks, cut_up, read
from tests.support.gateway.chat_templates import make_model
from tests.support.suite.damaged import ODD_VALUES

MODEL = make_model("chatml")


@cache
def parts(name: str) -> st.SearchStrategy[str]:
    """Tags of a format, whole calls, JSON values and other text."""
    output = get_format(name)
    calls = [CallDelta(name="look", arguments=value) for value in ('{"at": "a"}', "{}")]
    tags = (
        all_marks(output) + [output.write([call]) for call in calls] if output.takes_tools else []
    )
    known = [*tags, *ODD_VALUES, "<think>", "</think>", '{"name": "look"']
    return st.sampled_from(known) | st.text(max_size=4)


texts = st.sampled_from(sorted(BUILT_IN)).flatmap(
    lambda name: st.tuples(st.just(name), st.lists(parts(name), max_size=8).map("".join))
)
seeds = st.integers(0, 2**32)


def check(answer: ParsedAnswer) -> None:
    for call in answer.calls:
        assert isinstance(json.loads(call.arguments), dict), call


@given(texts, seeds)
def test_tool_calls(text: tuple[str, str], seed: int) -> None:
    """Each format reads any text, the same in any pieces; arguments of calls are JSON objects."""
    name, said = text
    answer, joined = read(get_format(name).parser(SAMPLE_TOOLS), [said])
    check(answer)
    assert read(get_format(name).parser(SAMPLE_TOOLS), cut_up(Random(seed), said)) == (
        answer,
        joined,
    )


@given(st.sampled_from(sorted(BUILT_IN_REASONING)), texts, seeds, st.booleans())
def test_reasoning(reasoning: str, text: tuple[str, str], seed: int, inside: bool) -> None:
    """Each reasoning format around each call format reads any text, the same in any pieces."""
    name, said = text

    def parser() -> Parser:
        inner = get_format(name).parser(SAMPLE_TOOLS)
        return BUILT_IN_REASONING[reasoning].parser(inner, inside=inside)

    answer, joined = read(parser(), [said])
    check(answer)
    assert read(parser(), cut_up(Random(seed), said)) == (answer, joined)


@given(
    st.lists(st.integers(0, MODEL.vocabulary_tokens - 1), max_size=40),
    texts,
    st.lists(st.sampled_from(("<", "look", "}", "\n")), max_size=2),
    st.booleans(),
)
def test_sampled_tokens(
    ids: list[int], text: tuple[str, str], stop: list[str], parallel: bool
) -> None:
    """Any tokens of the vocabulary become an answer; each kept token has its log-prob."""
    name, said = text
    calls = iter(range(1000))
    answer = AnswerParser(
        MODEL,
        (lambda: get_format(name).parser(SAMPLE_TOOLS)) if said else PlainParser,
        new_call_id=lambda: f"call-{next(calls)}",
        opening=said,
        stop=stop,
        parallel_calls=parallel,
    )
    columns = common_pb2.SampledTokens(
        ids=int32_bytes(ids),
        logprobs=float32_bytes([-0.5] * len(ids)),
        weight_versions=int32_bytes([1] * len(ids)),
    )
    answer.feed(columns)
    answer.finish()
    kept = answer.tokens()
    assert columns.ids.startswith(kept.ids)
    assert len(kept.ids) == len(kept.logprobs) == len(kept.weight_versions)
    for call in answer.message().tool_calls:
        assert isinstance(json.loads(call.arguments), dict), call
