"""The bytes of single tokens, from which clients join characters of several tokens."""

from __future__ import annotations

import functools
from itertools import accumulate
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from forge.core.formats import PlainParser
from forge.core.token_columns import float32_bytes, int32_array, int32_bytes
from forge.v1 import common_pb2
from services.gateway.http.openai.completions.chat import token_logprobs
from services.gateway.http.openai.completions.completions import logprobs
from services.gateway.model.chat_model import ChatModel
from services.gateway.turns.answer_parser import AnswerParser
from tests.support.gateway.chat_templates import make_model

TEXTS = ["Zoë 😀, naïve", "\ufffd", "日本語\n\t", "<|im_end|>", " a  b "]


@functools.cache
def byte_fallback_model() -> ChatModel:
    """A vocabulary of texts, in which a byte is a token of its own."""
    bytes_of = [f"<0x{byte:02X}>" for byte in range(256)]
    vocabulary = {token: number for number, token in enumerate([*bytes_of, "a", "é", "<end>"])}
    bpe = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    bpe.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<end>")
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    return ChatModel(tokenizer, name="fallback", context_tokens=64, stop_ids=[258])


def ids_of(model: ChatModel, text: str) -> list[int]:
    return list(int32_array(model.encode(text)))


@pytest.mark.parametrize("text", TEXTS)
def test_bytes_of_byte_level_tokens_are_those_of_the_text(text: str) -> None:
    """Also where a token is a part of a character."""
    model = make_model("chatml")
    assert b"".join(map(model.piece_bytes, ids_of(model, text))) == text.encode()


@pytest.mark.parametrize("text", ["aéa", "日😀", "\ufffd"])
def test_bytes_of_fallback_tokens_are_those_of_the_text(text: str) -> None:
    """A character that the vocabulary lacks is a token per byte."""
    model = byte_fallback_model()
    ids = ids_of(model, text)
    assert len(ids) > 1
    assert b"".join(map(model.piece_bytes, ids)) == text.encode()


def test_logprobs_of_chat_have_the_bytes_of_each_token() -> None:
    """Of sampled and of likely ones: joined they are the text of the answer."""
    model = make_model("chatml")
    answer = answered(model, "naïve 😀")
    turn: Any = cast(Any, SimpleNamespace(token_logprobs=answer.token_logprobs))
    shown = token_logprobs(turn)
    assert bytes(byte for one in shown for byte in one["bytes"]).decode() == "naïve 😀"
    assert [one["top_logprobs"][0]["bytes"] for one in shown] == [one["bytes"] for one in shown]


@pytest.mark.parametrize(
    ("model", "text"),
    [(make_model("chatml"), "naïve 😀 a"), (byte_fallback_model(), "aé😀éa日")],
    ids=["bytes", "fallback"],
)
def test_offsets_of_completions_are_places_in_the_text(model: ChatModel, text: str) -> None:
    """Each whole character begins at its token's offset; its further tokens have the same one."""
    tokens = answered(model, text).token_logprobs()
    raw = b"".join(one.sampled.raw for one in tokens)
    begins = accumulate((len(one.sampled.raw) for one in tokens[:-1]), initial=0)
    places = [len(raw[:begin].decode(errors="ignore")) for begin in begins]
    assert logprobs(model, tokens, as_ids=False)["text_offset"] == places


def answered(model: ChatModel, text: str) -> AnswerParser:
    """An answer with this text, whose only likely tokens are its own."""
    ids = ids_of(model, text)
    answer = AnswerParser(model, PlainParser, new_call_id=str)
    tokens = common_pb2.SampledTokens(
        ids=int32_bytes(ids),
        logprobs=float32_bytes([-0.5] * len(ids)),
        weight_versions=int32_bytes([1] * len(ids)),
        top_ids=int32_bytes(ids),
        top_logprobs=float32_bytes([-0.5] * len(ids)),
    )
    assert answer.feed(tokens)
    return answer
