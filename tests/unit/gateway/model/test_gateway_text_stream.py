"""The stream of a text: pieces of any sizes add up to the text of all ids, also where the bytes
are no text."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from forge.core.token_columns import int32_array
from services.gateway.model.chat_model import TextStream
from tests.support.gateway.chat_templates import make_model

MODEL = make_model("chatml")
BYTE_IDS = [next(i for i in range(420) if MODEL.piece_bytes(i) == bytes([n])) for n in range(256)]
"""The token of each byte."""
CHARACTERS = st.sampled_from(["a", " ", "é", "日", "😀", "\ufffd", "\u200d"])
PARTS = st.one_of(CHARACTERS.map(str.encode), st.binary(min_size=1, max_size=3))


def streamed(ids: list[int], sizes: list[int]) -> str:
    stream, text, rest = TextStream(MODEL), "", list(ids)
    for size in sizes:
        text += stream.feed(rest[:size])
        del rest[:size]
    text += "".join(stream.feed([one]) for one in rest)
    return text + stream.finish()


@given(st.lists(PARTS, max_size=30).map(b"".join), st.lists(st.integers(0, 9), max_size=6))
@example("\ufffd日本".encode(), [])
@example(b"\xff\xff\xff" + "😀".encode(), [])
@example("\ufffd".encode() * 40 + "é".encode(), [])
def test_text_of_any_bytes_is_that_of_all_at_once(data: bytes, sizes: list[int]) -> None:
    """A character behind U+FFFD, or behind bytes that are none, is whole."""
    ids = [BYTE_IDS[byte] for byte in data]
    assert streamed(ids, sizes) == MODEL.decode(ids)


@given(st.lists(st.integers(0, MODEL.vocabulary_tokens - 1), max_size=60))
def test_text_of_any_tokens_is_that_of_all_at_once(ids: list[int]) -> None:
    """Special tokens show no text, and longer ones may begin and end in a character."""
    assert streamed(ids, []) == MODEL.decode(ids)


@pytest.mark.parametrize("character", ["é", "日", "😀"])
def test_a_part_of_a_character_is_held_back(character: str) -> None:
    """Until the next token shows whether it is one."""
    *first, last = int32_array(MODEL.encode(character))
    stream = TextStream(MODEL)
    assert stream.feed(first) == ""
    assert stream.feed([last]) == character
    assert stream.feed(first) == ""
    assert stream.finish() == "\ufffd"
