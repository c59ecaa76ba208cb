"""Texts that are encoded once for all rollouts of a group."""

from __future__ import annotations

from services.gateway.model.encoding_cache import EncodingCache


def test_a_text_is_encoded_once_while_it_is_remembered() -> None:
    """The text unused for longest goes when there is no room, and is encoded again."""
    asked: list[str] = []

    def encode(text: str) -> bytes:
        asked.append(text)
        return text.encode() * 4

    encoded = EncodingCache(encode, max_bytes=2 * 8 * 10)
    for text in ("a" * 10, "b" * 10, "a" * 10, "c" * 10, "a" * 10, "b" * 10):
        assert encoded(text) == text.encode() * 4
    assert [text[0] for text in asked] == ["a", "b", "c", "b"]


def test_a_text_beyond_the_bound_takes_nobodys_place() -> None:
    """It is encoded each time it comes, and the others are still remembered."""
    asked: list[str] = []

    def encode(text: str) -> bytes:
        asked.append(text)
        return b""

    texts = EncodingCache(encode, max_bytes=100)
    for text in ("small", "x" * 26, "small", "x" * 26):
        texts(text)
    assert asked == ["small", "x" * 26, "x" * 26]
