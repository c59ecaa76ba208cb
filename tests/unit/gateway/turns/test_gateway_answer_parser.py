"""From tokens to answers: text in pieces, stop strings, calls with ids."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge.core.errors import DataLoss
from forge.core.formats import CallDelta, Delta, PlainParser, TextDelta, get_format
from forge.core.formats.hermes import HermesFormat
from forge.core.token_columns import float32_bytes, int32_array, int32_bytes
from forge.v1 import common_pb2
from forge.v1 import inference_pb2 as pb
from services.gateway.model.chat_model import TextStream
from services.gateway.turns.answer_parser import AnswerParser
from tests.support.gateway.chat_templates import make_model

MODEL = make_model("chatml")
END = min(MODEL.stop_ids)


def tokens(ids: list[int]) -> common_pb2.SampledTokens:
    return common_pb2.SampledTokens(
        ids=int32_bytes(ids),
        logprobs=float32_bytes([-0.5] * len(ids)),
        weight_versions=int32_bytes([1] * len(ids)),
    )


def spelt(text: str) -> list[int]:
    """Ids of a text, one character at a time."""
    return [i for char in text for i in int32_array(MODEL.encode(char))]


def read(answer: AnswerParser, pieces: list[list[int]]) -> str:
    """The streamed text of an answer."""
    deltas = []
    for piece in pieces:
        deltas += answer.feed(tokens(piece))
        if answer.stopped:
            break
    deltas += answer.finish()
    return "".join(delta.text for delta in deltas if isinstance(delta, TextDelta))


def parser_of(**options: Any) -> AnswerParser:
    numbers = itertools.count()
    parser = options.pop("parser", None) or PlainParser()
    return AnswerParser(
        MODEL, lambda: parser, new_call_id=lambda: f"call-{next(numbers)}", **options
    )


def cut(ids: list[int], sizes: list[int]) -> list[list[int]]:
    pieces, rest = [], list(ids)
    for size in sizes:
        pieces.append(rest[:size])
        del rest[:size]
    return [*pieces, rest]


@given(st.text("aé日🙂 \n", max_size=15), st.lists(st.integers(0, 4), max_size=6))
def test_streamed_pieces_split_no_character(text: str, sizes: list[int]) -> None:
    """For any batches of tokens, the pieces add up to the text and none has half a character."""
    stream = TextStream(MODEL)
    pieces = [stream.feed(ids) for ids in cut(spelt(text), sizes)]
    pieces.append(stream.finish())
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


@given(st.lists(st.integers(0, MODEL.vocabulary_tokens - 1), max_size=60))
def test_any_sampled_tokens_become_text(ids: list[int]) -> None:
    """Also nonsense, and every token is kept."""
    answer = parser_of()
    read(answer, [[i] for i in ids])
    assert answer.tokens().ids == int32_bytes(ids)


@given(
    st.text("abST", max_size=12),
    st.text("abST", max_size=4),
    st.lists(st.integers(0, 3), max_size=8),
)
def test_stop_string_ends_text_and_tokens(before: str, after: str, sizes: list[int]) -> None:
    """Text ends before the first stop string, tokens end with the one that completes it."""
    text = before + "STOP" + after
    answer = parser_of(stop=["STOP"])
    assert read(answer, cut([*spelt(text), END], sizes)) == text.partition("STOP")[0]
    assert answer.stopped
    end = text.index("STOP") + len("STOP")
    assert answer.tokens().ids == int32_bytes(spelt(text[:end]))
    columns = answer.tokens()
    assert len(columns.logprobs) == len(columns.weight_versions) == len(columns.ids)


def test_incomplete_stop_string_is_text() -> None:
    """It is returned at the end."""
    answer = parser_of(stop=["STOP"])
    assert read(answer, [[*spelt("ab STO"), END]]) == "ab STO"
    assert not answer.stopped


def test_end_token_is_kept_but_not_shown() -> None:
    """The end-of-turn token was sampled, so it is trained; it is no text."""
    answer = parser_of()
    assert read(answer, [[*spelt("hi"), END]]) == "hi"
    assert int32_array(answer.tokens().ids)[-1] == END
    assert [token.sampled.text for token in answer.token_logprobs()] == ["h", "i", "<|im_end|>"]


def test_calls_get_ids_once() -> None:
    """The id in the stream is the id in the message."""
    text = '<tool_call>\n{"name": "a", "arguments": {}}\n</tool_call>' * 2
    answer = parser_of(parser=MODEL.format.parser())
    deltas = [*answer.feed(tokens(spelt(text))), *answer.finish()]
    calls = [delta for delta in deltas if isinstance(delta, CallDelta)]
    assert [call.call_id for call in calls] == ["call-0", "call-1"]
    assert answer.message().call_ids == ("call-0", "call-1")


def test_call_ids_of_the_model_stay_unless_repeated() -> None:
    """A model that reads its ids keeps them, but no agent gets the same id twice."""
    kimi = get_format("kimi_k2")
    text = kimi.write([CallDelta(name="a", arguments="{}", call_id="functions.a:0")] * 2)
    answer = parser_of(parser=kimi.parser())
    answer.feed(tokens(spelt(text)))
    answer.finish()
    assert answer.message().call_ids == ("functions.a:0", "call-0")


def test_unequal_columns_are_refused() -> None:
    """A token without its log-prob is an engine error, raised at once."""
    broken = common_pb2.SampledTokens(ids=int32_bytes([5]), weight_versions=int32_bytes([1]))
    with pytest.raises(DataLoss):
        parser_of().feed(broken)


def test_answer_has_the_top_logprobs_of_its_tokens() -> None:
    """Of each token up to the last one, without tokens of probability zero."""
    sent = tokens(spelt("abc"))
    shown = spelt("axbycz")
    sent.top_ids = int32_bytes(shown)
    sent.top_logprobs = float32_bytes([-0.5, -1.0] * 2 + [-0.25, -math.inf])
    answer = parser_of()
    read_whole = [*answer.feed(sent), *answer.finish()]
    assert read_whole
    assert [
        [(top.text, top.logprob) for top in token.top] for token in answer.token_logprobs()
    ] == [
        [("a", -0.5), ("x", -1.0)],
        [("b", -0.5), ("y", -1.0)],
        [("c", -0.25)],
    ]
    stopped = parser_of(stop=["b"])
    stopped.feed(sent)
    assert [token.top[0].text for token in stopped.token_logprobs()] == ["a", "b"]
    sent.top_ids = sent.top_ids[:-8]
    with pytest.raises(DataLoss, match="unequal"):
        parser_of().feed(sent)


def test_answer_names_its_stop_string() -> None:
    """Of several stop strings the one that was completed is known afterwards."""
    answer = parser_of(stop=["STOP", "HALT"])
    assert read(answer, [spelt("go on HALT STOP")]) == "go on "
    assert answer.stop_text == "HALT"


def test_answer_without_parallel_calls_ends_after_one_call() -> None:
    """Text and ids behind the token that completed the call are dropped."""
    call = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
    answer = parser_of(parser=HermesFormat().parser(), parallel_calls=False)
    assert read(answer, [spelt(f"Well. {call}\n{call} Done.")]) == "Well."
    assert [made.call_id for made in answer.message().tool_calls] == ["call-0"]
    assert (answer.stopped, answer.stop_text, answer.parse_error) == (True, "", "")
    assert MODEL.decode(answer.tokens().ids) == f"Well. {call}"


def test_answer_without_parallel_calls_returns_the_first_of_a_list() -> None:
    """Where a format completes several calls with one token, the agent gets the first."""

    class ListParser(PlainParser):
        def feed(self, text: str) -> list[Delta]:
            return (
                [CallDelta(name=n, arguments="{}") for n in ("one", "two")] if "]" in text else []
            )

    answer = parser_of(parser=ListParser(), parallel_calls=False)
    deltas = [*answer.feed(tokens(spelt("[..] and so on"))), *answer.finish()]
    assert [delta.name for delta in deltas if isinstance(delta, CallDelta)] == ["one"]
    assert [made.name for made in answer.message().tool_calls] == ["one"]
    assert MODEL.decode(answer.tokens().ids) == "[..]"


@pytest.mark.parametrize("cut_short", [False, True])
def test_answer_has_the_newest_engine_of_its_responses(cut_short: bool) -> None:
    """Also an answer that a stop string ends, which gets no last response, and an aborted one; a
    retry forgets the engine of the lost answer."""
    answer = parser_of(stop=["!"])
    answer.add_response(pb.SampleResponse(tokens=tokens(spelt("lost")), engine="other"))
    answer.restart()
    answer.add_response(pb.SampleResponse(tokens=tokens(spelt("a")), engine="vllm"))
    end = pb.SampleResponse(tokens=tokens(spelt("b")), engine="vllm+embedded")
    if cut_short:
        end.tokens.CopyFrom(tokens(spelt("b!")))
    answer.add_response(end)
    sampled = answer.sampled_answer(parsed=False)
    assert sampled is not None
    assert (sampled.engine, answer.stopped) == ("vllm+embedded", cut_short)
