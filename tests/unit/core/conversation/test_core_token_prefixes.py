"""Sequences of a growing trajectory and the prefixes they share."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from forge.core.conversation.token_prefixes import NOTHING_SHARED, SharedPrefix, TokenPrefixes
from forge.core.token_columns import common_tokens, int32_bytes

sequences = st.lists(st.integers(0, 2), max_size=12)


def agreement(left: list[int], right: list[int]) -> int:
    agreed = 0
    while agreed < min(len(left), len(right)) and left[agreed] == right[agreed]:
        agreed += 1
    return agreed


@given(sequences, sequences)
def test_common_tokens_counts_whole_tokens(left: list[int], right: list[int]) -> None:
    """The count equals that of a loop over tokens, for any shared bytes of partly equal tokens."""
    assert common_tokens(int32_bytes(left), int32_bytes(right)) == agreement(left, right)


@given(st.lists(st.tuples(sequences, sequences), min_size=1, max_size=12), sequences)
def test_turns_behind_their_longest_prefix_are_read_back_whole(
    turns: list[tuple[list[int], list[int]]], asked: list[int]
) -> None:
    """Turns stored behind their longest shared prefix give back prompt, sample and sequence, and
    the longest prefix of any other sequence is the best over all of them."""
    prefixes = TokenPrefixes()
    for prompt, sampled in turns:
        shared = prefixes.longest(int32_bytes(prompt))
        best = max(
            (agreement(prompt, p + s) for p, s in turns[: len(prefixes)]),
            default=0,
        )
        assert shared.tokens == best
        prefixes.append(shared, int32_bytes(prompt[shared.tokens :]), int32_bytes(sampled))
    for turn, (prompt, sampled) in enumerate(turns):
        assert prefixes.prompt(turn) == int32_bytes(prompt)
        assert prefixes.sampled(turn) == int32_bytes(sampled)
        assert prefixes.sequence(turn) == int32_bytes(prompt + sampled)
    longest = prefixes.longest(int32_bytes(asked))
    assert longest.tokens == max(agreement(asked, p + s) for p, s in turns)
    if longest.turn >= 0:
        assert prefixes.sequence(longest.turn)[: longest.tokens * 4] == int32_bytes(
            asked[: longest.tokens]
        )


def test_earliest_turn_with_the_shared_prefix_is_the_parent() -> None:
    """A prefix that several turns share belongs to the first of them; a prefix without a turn has
    no parent."""
    prefixes = TokenPrefixes()
    assert prefixes.longest(int32_bytes([1])) == NOTHING_SHARED
    for _ in range(3):
        prompt = int32_bytes([1, 2, 3])
        shared = prefixes.longest(prompt)
        prefixes.append(shared, prompt[shared.tokens * 4 :], int32_bytes([9]))
    assert prefixes.longest(int32_bytes([1, 2, 3, 4])).turn == 0


@given(
    st.lists(st.tuples(sequences, sequences), min_size=1, max_size=12),
    st.integers(0, 11),
    st.integers(0, 24),
    sequences,
)
def test_search_with_a_known_shared_prefix_has_the_same_result(
    turns: list[tuple[list[int], list[int]]], turn: int, tokens: int, more: list[int]
) -> None:
    """A lower bound of the shared prefix does not change the result of the search."""
    prefixes = TokenPrefixes()
    for prompt, sampled in turns:
        shared = prefixes.longest(int32_bytes(prompt))
        prefixes.append(shared, int32_bytes(prompt[shared.tokens :]), int32_bytes(sampled))
    turn %= len(turns)
    sequence = prefixes.sequence(turn)[: tokens * 4]
    known = SharedPrefix(turn=turn, tokens=len(sequence) // 4)
    ids = sequence + int32_bytes(more)
    assert prefixes.longest(ids, known=known) == prefixes.longest(ids)
