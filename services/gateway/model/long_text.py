"""Tokens of a long text: counted in slices, and encoded whole only if they may fit.

An encoded token takes some 200 bytes until its id is copied, and a text may have a token per byte:
31 MiB took a minute and 6 GiB. Owns the slices and the margin of their count. Encodes nothing
itself.
"""

from __future__ import annotations

from collections.abc import Callable

from forge.core.token_columns import TOKEN_BYTES

SLICE_CHARS = 1 << 16
UNKNOWN_TOKEN_BYTES = 1024
"""Taken for the longest token where it is unknown."""
FITTING_CHARS_PER_TOKEN = 4
"""Texts up to this length per token of room are encoded whole: their tokens are few enough."""


def encode_within(
    encode: Callable[[str], bytes],
    text: str,
    room: int,
    *,
    longest_token_bytes: int,
    whole: Callable[[str], bytes],
) -> tuple[int, bytes]:
    """Returns the tokens of a text and its int32 ids by `whole`; no ids for more than `room`
    tokens, and then the tokens of its beginning alone, which are more than `room`.

    `encode` encodes slices. `room` bounds the work at any length of the text. `longest_token_bytes`
    is 0 if unknown.
    """
    if len(text) > FITTING_CHARS_PER_TOKEN * room:
        tokens = _tokens_of_beginning(
            encode, text, room, longest_token_bytes or UNKNOWN_TOKEN_BYTES
        )
        if tokens > room:
            return tokens, b""
    ids = whole(text)
    return len(ids) // TOKEN_BYTES, ids


def _tokens_of_beginning(
    encode: Callable[[str], bytes], text: str, enough: int, cut_tokens: int
) -> int:
    """Returns a lower bound of the tokens; stops at a beginning with more than `enough`.

    A cut through a token makes `cut_tokens` at most of it.
    """
    tokens = 0
    for start in range(0, len(text), SLICE_CHARS):
        ids = encode(text[start : start + SLICE_CHARS])
        tokens += max(0, len(ids) // TOKEN_BYTES - cut_tokens)
        if tokens > enough:
            break
    return tokens
