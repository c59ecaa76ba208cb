"""Requests that are recognized by what they begin with."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from forge.core.conversation.messages import Message, from_openai
from forge.core.conversation.request_prefix import History

texts = st.text(st.sampled_from('ab ,]["\\{}\n'), max_size=6)
messages = st.lists(texts, min_size=1, max_size=6)
spaces = st.text(st.sampled_from(" \n"), max_size=2)


class Reader:
    """Decodes, and remembers what it had to decode."""

    def __init__(self) -> None:
        self.read: list[tuple[int, int]] = []

    def __call__(self, array: bytes, first: int) -> list[Message]:
        found = [from_openai(plain) for plain in json.loads(array)]
        self.read.append((first, len(found)))
        return found


def written(contents: list[str], space: str = "") -> bytes:
    plain = [json.dumps({"role": "user", "content": content}) for content in contents]
    return f"[{space}{f'{space},{space}'.join(plain)}{space}]".encode()


def contents_of(found: list[Message]) -> list[str]:
    return [message.content for message in found]


@given(messages, messages, spaces)
def test_known_beginning_of_a_request_is_not_decoded_again(
    old: list[str], new: list[str], space: str
) -> None:
    """A longer request is recognized by the mark of a shorter one, and only its rest is decoded,
    for any quotes and brackets in the texts."""
    mark = History(written(old, space), Reader()).mark()
    reader = Reader()
    later = History(written(old + new, space), reader)
    assert later.known([mark]) == mark
    assert contents_of(later.behind(mark)) == new
    assert reader.read == [(len(old), len(new))]
    assert len(later) == len(old + new)
    assert contents_of(later[:]) == old + new


@given(messages, messages)
def test_mark_is_recognized_only_with_the_same_messages(old: list[str], new: list[str]) -> None:
    """A mark is recognized exactly where the request begins with its messages."""
    mark = History(written(old), Reader()).mark()
    known = History(written(new), Reader()).known([mark])
    assert (known == mark) == (new[: len(old)] == old)


def test_longest_mark_wins() -> None:
    """Of several recognized requests, the longest one is continued."""
    marks = [History(written(["a", "b", "c"][:count]), Reader()).mark() for count in (3, 1, 2)]
    history = History(written(["a", "b", "x"]), Reader())
    assert history.known(marks) == marks[2]
    assert contents_of(history.behind(marks[2])) == ["x"]
    assert history.known([]) is None


def test_repeated_request_has_no_rest() -> None:
    """A request with the same messages is recognized to its end."""
    mark = History(written(["a", "b"]), Reader()).mark()
    again = History(written(["a", "b"]), Reader())
    assert again.known([mark]) == mark
    assert again.behind(mark) == []
    assert again.mark() == mark
