"""The lower bound of a text's tokens never exceeds its tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    models,
    normalizers,
    pre_tokenizers,
)

from services.gateway.model.token_bound import longest_token_bytes
from tests.support.gateway.chat_templates import FAMILIES, make_model

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def bpe(
    normalizer: normalizers.Normalizer | None = None,
    splitter: pre_tokenizers.PreTokenizer | None = None,
    *extra: str,
) -> Tokenizer:
    """A byte-level tokenizer, or one with a fallback to bytes if it has no splitter."""
    texts = [*(ALPHABET if splitter else BYTES), *extra]
    model = models.BPE(
        vocab={text: at for at, text in enumerate(texts)},
        merges=[],
        byte_fallback=not splitter,
        ignore_merges=True,
    )
    tokenizer = Tokenizer(model)
    if normalizer:
        tokenizer.normalizer = normalizer
    if splitter:
        tokenizer.pre_tokenizer = splitter
    return tokenizer


BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False)
SENTENCE = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
BOUNDED = [
    bpe(None, BYTE_LEVEL),
    bpe(None, BYTE_LEVEL, "aaaa"),
    bpe(normalizers.NFC(), BYTE_LEVEL),
    bpe(normalizers.NFKC(), BYTE_LEVEL),
    bpe(SENTENCE, None, "▁", "a"),
    bpe(normalizers.Replace("aaaaa", "b"), BYTE_LEVEL),
]
SHRINKING = st.text(alphabet="a \u0390\u03b9\u0308\u0301\U0001d7ce\u0344\u1fbe\u1fef\n的")


@pytest.mark.parametrize("tokenizer", BOUNDED)
@given(text=st.text() | SHRINKING | st.sampled_from(["a" * 999, "\U0001d7ce" * 99]))
def test_token_bound_is_never_above_the_token_count(tokenizer: Tokenizer, text: str) -> None:
    """For tokenizers over bytes, with normal forms that shorten a text, and with a fallback."""
    longest = longest_token_bytes(tokenizer)
    assert longest
    tokens = len(tokenizer.encode(text, add_special_tokens=False).ids)
    assert tokens >= len(text.encode()) / longest


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_a_bound(family: str) -> None:
    """The bound of a model is that of its tokenizer; an empty text has no token."""
    model = make_model(family)
    assert model.least_tokens("") == 0
    assert 0 < model.least_tokens("a b" * 999) <= len(model.encode("a b" * 999)) // 4


def lossy() -> dict[str, Tokenizer]:
    """Tokenizers that drop or join texts of any length."""
    made = {
        "lower": bpe(normalizers.Lowercase(), BYTE_LEVEL),
        "strip": bpe(normalizers.Strip(), BYTE_LEVEL),
        "regex": bpe(normalizers.Replace(Regex(" +"), " "), BYTE_LEVEL),
        "erase": bpe(normalizers.Replace("a", ""), BYTE_LEVEL),
        "spaces": bpe(None, pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), BYTE_LEVEL])),
        "removed": bpe(
            None, pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), BYTE_LEVEL])
        ),
        "words": Tokenizer(models.WordLevel({"a": 0}, unk_token="a")),
        "letters": Tokenizer(models.BPE(vocab={"a": 0}, merges=[])),
        "truncates": bpe(None, BYTE_LEVEL),
        "absorbs": bpe(None, BYTE_LEVEL),
    }
    made["truncates"].enable_truncation(8)
    made["absorbs"].add_special_tokens([AddedToken("<end>", rstrip=True)])
    return made


@pytest.mark.parametrize("name", lossy())
def test_tokenizer_that_loses_text_has_bound_0(name: str) -> None:
    """Every text is then tokenized, at any length."""
    assert longest_token_bytes(lossy()[name]) == 0
