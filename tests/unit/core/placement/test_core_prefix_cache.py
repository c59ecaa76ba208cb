"""The index of cached prefixes: what it finds, what it forgets, and whose slots are whose."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from forge.core.placement.prefix_cache import Match, PrefixCache

BLOCK = 4


def ids(*tokens: int) -> bytes:
    return array("i", tokens).tobytes()


def cache(blocks: int) -> PrefixCache:
    return PrefixCache(block_tokens=BLOCK, capacity_tokens=blocks * BLOCK)


def test_prefix_cache_matches_whole_blocks() -> None:
    """A prompt that shares nine tokens finds two blocks of four."""
    index = cache(8)
    placed = index.insert(ids(*range(11)))
    assert [block.start_token for block in placed] == [0, 4]
    match = index.match(ids(*range(9), 99, 99, 99))
    assert match.tokens == 8
    assert match.slots == tuple(block.slot for block in placed)
    assert index.match(ids(5, *range(1, 9))).tokens == 0


def test_the_limit_cuts_a_match() -> None:
    """With a limit of seven tokens one whole block is left."""
    index = cache(8)
    index.insert(ids(*range(8)))
    assert index.match(ids(*range(8)), limit_tokens=7).tokens == 4


def test_only_new_blocks_are_placed() -> None:
    """Inserting a longer prefix gives slots for its tail alone."""
    index = cache(8)
    index.insert(ids(*range(8)))
    assert [block.start_token for block in index.insert(ids(*range(16)))] == [8, 12]
    assert index.tokens == 16


def test_blocks_that_could_not_be_filled_are_withdrawn() -> None:
    """With their slots; the prefix before them stays, and no other block is lost."""
    index = cache(4)
    index.insert(ids(*range(4)))
    placed = index.insert(ids(*range(12)))
    index.withdraw(placed)
    assert index.match(ids(*range(12))).tokens == 4
    assert index.tokens == 4
    again = index.insert(ids(*range(16)))
    assert {one.slot for one in placed} < {one.slot for one in again}
    assert index.match(ids(*range(16))).tokens == 16


def test_least_recently_used_leaf_is_evicted_first() -> None:
    """A used prefix stays; an unused one is evicted from its end."""
    index = cache(4)
    old, young = [0] * 8, [1] * 8
    index.insert(ids(*old))
    index.insert(ids(*young))
    index.match(ids(*old))
    index.insert(ids(*[2] * 4))
    assert index.match(ids(*old)).tokens == 8
    assert index.match(ids(*young)).tokens == 4


def test_peek_does_not_mark_a_prefix_as_used() -> None:
    """A router's look at the index does not keep a prefix in the cache."""
    index = cache(2)
    index.insert(ids(*[0] * 4))
    index.insert(ids(*[1] * 4))
    assert index.peek(ids(*[0] * 4)) == 4
    index.insert(ids(*[2] * 4))
    assert index.peek(ids(*[0] * 4)) == 0


def test_prefix_longer_than_the_cache_is_cached_in_part() -> None:
    """The part that fits is cached, and is right."""
    index = cache(2)
    assert len(index.insert(ids(*range(12)))) == 2
    assert index.match(ids(*range(12))).tokens == 8


def test_pinned_blocks_survive_pressure() -> None:
    """While pinned, a prefix keeps its slots; another one is then kept in part or not at all."""
    index = cache(2)
    index.insert(ids(*range(8)))
    match = index.match(ids(*range(8)), pin=True)
    assert index.insert(ids(*[9] * 8)) == []
    index.unpin(match)
    assert len(index.insert(ids(*[9] * 8))) == 2


def test_clearing_keeps_the_slots_of_pinned_blocks_until_unpinned() -> None:
    """After a clear nothing is found, yet a reader of old slots is not written over."""
    index = cache(2)
    index.insert(ids(*range(8)))
    match = index.match(ids(*range(8)), pin=True)
    index.clear()
    assert index.match(ids(*range(8))).tokens == 0
    assert index.insert(ids(*[9] * 8)) == []
    index.unpin(match)
    assert {block.slot for block in index.insert(ids(*[9] * 8))} == set(match.slots)


def test_a_cache_without_room_caches_nothing() -> None:
    """Capacity below one block is allowed and simply never hits."""
    index = cache(0)
    assert index.insert(ids(*range(8))) == []
    assert index.match(ids(*range(8))).tokens == 0


def test_block_size_0_is_refused() -> None:
    """It would never end."""
    with pytest.raises(ValueError, match="block_tokens"):
        PrefixCache(block_tokens=0, capacity_tokens=8)


prompts = st.lists(st.integers(0, 1), max_size=24).map(lambda tokens: ids(*tokens))


class CacheMachine(RuleBasedStateMachine):
    """Slots stand for contents: a match must only ever name slots filled with its own tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.index = cache(5)
        self.contents: dict[int, bytes] = {}
        self.pinned: list[tuple[Match, list[bytes]]] = []

    @rule(prompt=prompts)
    def insert(self, prompt: bytes) -> None:
        for block in self.index.insert(prompt):
            self.contents[block.slot] = prompt[: (block.start_token + BLOCK) * 4]

    @rule(prompt=prompts, pin=st.booleans())
    def match(self, prompt: bytes, pin: bool) -> None:
        match = self.index.match(prompt, pin=pin)
        found = [self.contents[slot] for slot in match.slots]
        assert found == [prompt[: (n + 1) * BLOCK * 4] for n in range(len(match.slots))]
        assert match.tokens == len(match.slots) * BLOCK
        if pin:
            self.pinned.append((match, found))

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        match, _ = self.pinned.pop(data.draw(st.integers(0, len(self.pinned) - 1)))
        self.index.unpin(match)

    @rule()
    def clear(self) -> None:
        self.index.clear()

    @invariant()
    def pinned_slots_keep_their_contents(self) -> None:
        for match, found in self.pinned:
            assert [self.contents[slot] for slot in match.slots] == found

    @invariant()
    def the_bound_holds(self) -> None:
        assert 0 <= self.index.tokens <= 5 * BLOCK


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


@given(st.lists(prompts, max_size=20))
def test_without_pressure_every_insert_is_found_whole(inserted: list[bytes]) -> None:
    """With room for all, each prompt's whole blocks are found."""
    index = cache(200)
    for prompt in inserted:
        index.insert(prompt)
    for prompt in inserted:
        assert index.match(prompt).tokens == len(prompt) // 4 // BLOCK * BLOCK


def test_common_prefix_of_two_pinned_prompts_is_shared() -> None:
    """Until one of them is unpinned."""
    index = cache(8)
    index.insert(ids(*range(8), *[50] * 4))
    index.insert(ids(*range(8), *[60] * 4))
    one = index.match(ids(*range(8), *[50] * 4), pin=True)
    assert index.shared_tokens(one) == 0
    other = index.match(ids(*range(8), *[60] * 4), pin=True)
    assert index.shared_tokens(one) == index.shared_tokens(other) == 8
    index.unpin(other)
    assert index.shared_tokens(one) == 0
