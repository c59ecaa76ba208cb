"""Domain shares: quotas by largest remainder, exact over many batches."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge.core.errors import InvalidArgument
from forge.core.queue.window.domain_shares import DomainShares

SHARES = st.dictionaries(
    st.text("abcdefgh", min_size=1, max_size=2),
    st.floats(min_value=0.01, max_value=100.0),
    min_size=1,
    max_size=6,
)


def test_largest_remainders_are_rounded_up() -> None:
    """3.5, 2.1 and 1.4 of 7 become 4, 2 and 1."""
    shares = DomainShares({"a": 0.5, "b": 0.3, "c": 0.2})
    assert shares.quotas(7) == {"a": 4, "b": 2, "c": 1}


def test_rounding_is_corrected_in_the_next_batch() -> None:
    """Four domains of a quarter each share batches of two in turns."""
    shares = DomainShares({"a": 1, "b": 1, "c": 1, "d": 1})
    first = shares.quotas(2)
    shares.settle(2, first)
    second = shares.quotas(2)
    assert {domain for domain, quota in (*first.items(), *second.items()) if quota} <= set("abcd")
    assert all(first[domain] + second[domain] == 1 for domain in "abcd")


def test_queue_without_shares_has_no_quotas() -> None:
    """A batch is in queue order alone."""
    assert DomainShares({}).quotas(8) == {}


@pytest.mark.parametrize("share", [0.0, -1.0, float("nan"), float("inf")])
def test_share_must_be_a_positive_number(share: float) -> None:
    """The message names the domain and the value."""
    with pytest.raises(InvalidArgument, match="domain share code"):
        DomainShares({"code": share})


@given(SHARES, st.lists(st.integers(1, 64), min_size=1, max_size=40))
def test_quotas_sum_to_the_batch_and_follow_the_shares(
    weights: dict[str, float], sizes: list[int]
) -> None:
    """Every batch is full, and the long-run part of a domain is its share to within a few
    groups."""
    shares = DomainShares(weights)
    given_out: Counter[str] = Counter()
    for size in sizes:
        quotas = shares.quotas(size)
        assert sum(quotas.values()) == size
        assert min(quotas.values()) >= 0
        shares.settle(size, quotas)
        given_out.update(quotas)
    for domain, share in shares.shares.items():
        assert abs(given_out[domain] - share * sum(sizes)) < len(weights) + 1e-6
