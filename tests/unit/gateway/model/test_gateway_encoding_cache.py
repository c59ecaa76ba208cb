"""Texts that are encoded once for all rollouts of a group."""

from __future__ import annotations

from services.gateway.model.encoding_cache import EncodingCache


def test_cached_text_is_encoded_once() -> None:
    """The least recently used text is evicted, and encoded again."""
    asked: list[str] = []

    def encode(text: str) -> bytes:
        asked.append(text)
        return text.encode() * 4

    encoded = EncodingCache(encode, max_bytes=2 * 8 * 10)
    for text in ("a" * 10, "b" * 10, "a" * 10, "c" * 10, "a" * 10, "b" * 10):
        assert encoded(text) == text.encode() * 4
    assert [text[0] for text in asked] == ["a", "b", "c", "b"]


def test_text_beyond_the_cache_bound_evicts_no_other() -> None:
    """It is encoded each time."""
    asked: list[str] = []

    def encode(text: str) -> bytes:
        asked.append(text)
        return b""

    texts = EncodingCache(encode, max_bytes=100)
    for text in ("small", "x" * 26, "small", "x" * 26):
        texts(text)
    assert asked == ["small", "x" * 26, "x" * 26]
