"""Marks of calls: by headers, and by the suffix of an API key."""

from __future__ import annotations

import pytest

from forge.core.errors import InvalidArgument
from services.gateway.conversation.call_labels import CallLabels, split_key, with_headers

TOKEN = "v1.eyJzdWIi-_A.q-_9"


@pytest.mark.parametrize(
    ("suffix", "labels"),
    [
        ("", CallLabels()),
        ("+planner", CallLabels("planner")),
        ("~titles", CallLabels("titles", train=False)),
        ("~", CallLabels(train=False)),
    ],
)
def test_suffix_of_a_key_labels_its_calls(suffix: str, labels: CallLabels) -> None:
    """The token before it is unchanged."""
    assert split_key(TOKEN + suffix) == (TOKEN, labels)


def test_headers_replace_the_labels_of_a_key() -> None:
    """Each header by itself."""
    labels = CallLabels("titles", train=False)
    assert with_headers(labels, {}) == labels
    assert with_headers(labels, {"X-Forge-Train": "True"}) == CallLabels("titles", train=True)
    assert with_headers(labels, {"X-Forge-Agent": "a.b-c_1"}) == CallLabels("a.b-c_1", train=False)


@pytest.mark.parametrize(
    ("headers", "said"),
    [
        ({"X-Forge-Train": "no"}, "X-Forge-Train 'no' must be true or false"),
        ({"X-Forge-Agent": "a b"}, "X-Forge-Agent 'a b' must be at most 64 of "),
        ({"X-Forge-Agent": "a" * 65}, "must be at most 64 of "),
    ],
)
def test_wrong_mark_is_named(headers: dict[str, str], said: str) -> None:
    """Header and value."""
    with pytest.raises(InvalidArgument, match=said):
        with_headers(CallLabels(), headers)


def test_wrong_suffix_is_named() -> None:
    """A key with two suffixes has a name that no agent may have."""
    with pytest.raises(InvalidArgument, match="the suffix of the API key 'a~b' must be"):
        split_key(f"{TOKEN}+a~b")
