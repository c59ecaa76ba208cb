"""The part of a vocabulary that is drafted: what the policy samples, in bounded memory."""

from __future__ import annotations

import torch

from services.inference.engines.embedded.speculation.draft_vocabulary import (
    REFRESH_TOKENS,
    DraftVocabulary,
)

VOCABULARY, MOST = 1000, 100


def chosen(vocabulary: DraftVocabulary) -> list[int]:
    found: list[int] = vocabulary.tokens.tokens_S.tolist()
    return found


def test_first_tokens_are_drafted_before_any_is_sampled() -> None:
    """Tokenizers number tokens by their frequency."""
    assert chosen(DraftVocabulary(VOCABULARY, most=MOST)) == list(range(MOST))


def test_sampled_tokens_replace_the_others() -> None:
    """At the next choice, each once and in order; the rest are still the first ones."""
    vocabulary = DraftVocabulary(VOCABULARY, most=MOST)
    before = vocabulary.tokens
    sampled = list(range(900, 960))
    vocabulary.observe(sampled)
    assert vocabulary.tokens is before
    vocabulary.observe((sampled * REFRESH_TOKENS)[:REFRESH_TOKENS])
    assert chosen(vocabulary) == [*range(40), *sampled]


def test_tokens_that_are_sampled_no_more_are_forgotten() -> None:
    """Counts decay, so the part follows a policy that moves."""
    vocabulary = DraftVocabulary(VOCABULARY, most=MOST)
    earlier, later = range(500, 500 + MOST), range(700, 700 + MOST)
    for part in [earlier] * 20 + [later] * 60:
        vocabulary.observe((list(part) * REFRESH_TOKENS)[:REFRESH_TOKENS])
    assert chosen(vocabulary) == list(later)


def test_same_part_is_not_copied_again() -> None:
    """Rows of the head are copied for each new object."""
    vocabulary = DraftVocabulary(VOCABULARY, most=MOST)
    before = vocabulary.tokens
    vocabulary.observe([5] * REFRESH_TOKENS)
    assert vocabulary.tokens is before


def test_size_never_grows() -> None:
    """However many tokens are sampled."""
    torch.manual_seed(0)
    vocabulary = DraftVocabulary(VOCABULARY, most=MOST)
    for _ in range(30):
        vocabulary.observe(torch.randint(VOCABULARY, (REFRESH_TOKENS,)).tolist())
        assert len(vocabulary.tokens) == MOST
