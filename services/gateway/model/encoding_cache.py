"""Ids of texts that are encoded again and again: the first prompts of a group's rollouts.

Pure memory: the same text has the same ids, whoever asks. From any thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from threading import Lock


class EncodedTexts:
    """Remembers the ids of the texts used last, up to a number of bytes."""

    def __init__(self, encode: Callable[[str], bytes], *, max_bytes: int) -> None:
        self._encode = encode
        self._max_bytes = max_bytes
        self._ids: OrderedDict[str, bytes] = OrderedDict()
        """The longest unused first."""
        self._bytes = 0
        self._lock = Lock()

    def __call__(self, text: str) -> bytes:
        """int32 ids of a text."""
        with self._lock:
            ids = self._ids.get(text)
            if ids is not None:
                self._ids.move_to_end(text)
                return ids
        ids = self._encode(text)
        size = _size(text, ids)
        if size > self._max_bytes:
            return ids  # It would take the place of all others, and not stay either.
        with self._lock:
            if text not in self._ids:
                self._ids[text] = ids
                self._bytes += size
            while self._bytes > self._max_bytes:
                self._bytes -= _size(*self._ids.popitem(last=False))
        return ids


def _size(text: str, ids: bytes) -> int:
    # Four bytes per character are the most that text takes.
    return 4 * len(text) + len(ids)
