"""A text that may not fit is counted in slices first; a text that fits is always encoded."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from forge.core.token_columns import TOKEN_BYTES, int32_bytes
from services.gateway.model import long_text
from services.gateway.model.token_bound import longest_token_bytes
from tests.support.gateway.chat_templates import make_model, make_tokenizer

MIB = 1 << 20
MODEL = make_model("chatml")


def test_tokenizing_is_bounded_by_the_remaining_context() -> None:
    """Of 4 MiB with a token for each byte, two slices are encoded for a room of 100,000."""
    encoded: list[int] = []

    def encode(text: str) -> bytes:
        encoded.append(len(text))
        return bytes(len(text) * TOKEN_BYTES)

    tokens, ids = long_text.encode_within(
        encode, "a" * 4 * MIB, 100_000, longest_token_bytes=13, whole=encode
    )
    assert tokens > 100_000 and not ids
    assert encoded == [long_text.SLICE_CHARS] * 2


def spaced() -> Tokenizer:
    """With a token of 512 letters, which a cut makes 512 tokens."""
    tokenizer = Tokenizer.from_str(make_tokenizer("chatml").backend_tokenizer.to_str())
    tokenizer.add_tokens(["x" * 512])
    return tokenizer


@pytest.mark.parametrize("tokenizer", [MODEL._backend, spaced()], ids=["short", "long"])
@given(
    part=st.text(min_size=1, max_size=40) | st.sampled_from(["x" * 511, "x" * 512, " " * 128]),
    times=st.integers(1, 300),
    spare=st.integers(0, 5),
)
def test_text_within_the_context_is_encoded(
    tokenizer: Tokenizer, part: str, times: int, spare: int
) -> None:
    """For any cuts between its slices: the count of slices never exceeds the tokens of the text."""

    def encode(text: str) -> bytes:
        return int32_bytes(tokenizer.encode(text, add_special_tokens=False).ids)

    text = "a" + part * times
    whole = encode(text)
    room = len(whole) // TOKEN_BYTES + spare
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(long_text, "SLICE_CHARS", 2048)
        got = long_text.encode_within(
            encode, text, room, longest_token_bytes=longest_token_bytes(tokenizer), whole=encode
        )
    assert got == (len(whole) // TOKEN_BYTES, whole)
