"""The plan of a prefill pass: its prompts, and the tokens of each."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forge.core.placement.prefix_cache import PrefixCache
from services.inference.engines.base import Prompt, Sampling
from services.inference.engines.embedded.prefill_schedule import (
    Reading,
    Span,
    WaitingPrefixes,
    next_pass,
)

SAMPLING = Sampling(temperature=1.0, top_p=1.0, top_k=0, max_tokens=1, stop_ids=frozenset(), seed=0)


def reading(tokens: int, *, source: Reading | None = None, shared: int = 0) -> Reading:
    return Reading(
        prompt=Prompt(request_id="r", ids=bytes(4 * tokens), sampling=SAMPLING),
        ids=torch.zeros(tokens, dtype=torch.long),
        kv=torch.empty(0),
        routes=torch.empty(0),
        cached=0,
        source=source,
        shared=shared,
        done=shared,
    )


def compute(spans: Sequence[Span]) -> None:
    """What the pass does to the readings, and that it may."""
    filled = {id(span.reading): span.reading.filled for span in spans}
    for span in spans:
        one = span.reading
        assert span.start == one.done < span.end <= one.prompt.tokens
        if one.source is not None and span.start == one.shared:
            assert filled.get(id(one.source), one.source.filled) >= one.shared
        one.done = one.filled = filled[id(one)] = span.end


@given(
    tokens=st.lists(st.integers(1, 60), min_size=1, max_size=8),
    sources=st.lists(st.integers(0, 7), min_size=8, max_size=8),
    budget=st.integers(1, 50),
)
def test_every_prompt_is_computed_once_within_the_budget(
    tokens: list[int], sources: list[int], budget: int
) -> None:
    """Whatever shares what: no pass exceeds the budget, a shared prefix is there before it is
    copied, the oldest prompt gets half of each pass, and all end."""
    pending: list[Reading] = []
    for number, size in enumerate(tokens):
        source = pending[sources[number] % number] if number else None
        shared = min(size - 1, source.prompt.tokens) if source is not None else 0
        pending.append(reading(size, source=source if shared else None, shared=shared))
    expected = sum(one.prompt.tokens - one.shared for one in pending)
    computed = 0
    while pending:
        spans = next_pass(pending, budget=budget)
        sizes = [span.end - span.start for span in spans]
        assert sum(sizes) <= budget
        assert spans[0].reading is pending[0]
        assert sizes[0] >= min(pending[0].left, (budget + 1) // 2)
        compute(spans)
        computed += sum(sizes)
        pending = [one for one in pending if one.left]
    assert computed == expected


def test_short_prompts_do_not_wait_for_a_long_one() -> None:
    """They end with the first pass, the shortest first; a prompt alone gets the whole pass."""
    long, middle, short = reading(4000), reading(90), reading(8)
    spans = next_pass([long, middle, short], budget=200)
    assert [(span.reading, span.end) for span in spans] == [(long, 102), (short, 8), (middle, 90)]
    assert [span.end for span in next_pass([long], budget=200)] == [200]


def test_group_is_computed_in_one_pass() -> None:
    """The later prompts copy the prefix of the first, which comes before them."""
    first = reading(100)
    others = [reading(100 + n, source=first, shared=96) for n in range(1, 4)]
    spans = next_pass([first, *others], budget=400)
    assert [span.reading for span in spans] == [first, *others]
    assert [(span.start, span.end) for span in spans[1:]] == [(96, 101), (96, 102), (96, 103)]
    compute(spans)


def test_prompt_is_indexed_when_a_later_one_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lone prompt costs no index of its blocks."""
    indexed: list[bytes] = []
    insert = PrefixCache.insert

    def observed(self: PrefixCache, ids: bytes) -> object:
        indexed.append(ids)
        return insert(self, ids)

    monkeypatch.setattr(PrefixCache, "insert", observed)
    first, second = reading(8), reading(12)
    prefixes = WaitingPrefixes([], tokens=20, block_tokens=4)
    assert prefixes.longest(first.prompt, limit_tokens=7) == (None, 0)
    prefixes.add(first)
    assert not indexed
    assert prefixes.longest(second.prompt, limit_tokens=11) == (first, 8)
    assert indexed == [first.prompt.ids]
