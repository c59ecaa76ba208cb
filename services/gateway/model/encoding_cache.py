"""Cache of encoded texts: the rollouts of a group have the same first prompt.

Thread-safe. Owns no tokenizer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from threading import Lock


class EncodingCache:
    """LRU cache from text to ids, bounded by bytes."""

    def __init__(self, encode: Callable[[str], bytes], *, max_bytes: int) -> None:
        self._encode = encode
        self._max_bytes = max_bytes
        self._ids: OrderedDict[str, bytes] = OrderedDict()
        """Least recently used first."""
        self._bytes = 0
        self._lock = Lock()

    def __call__(self, text: str) -> bytes:
        """Returns the int32 ids of a text."""
        with self._lock:
            ids = self._ids.get(text)
            if ids is not None:
                self._ids.move_to_end(text)
                return ids
        ids = self._encode(text)
        size = _size(text, ids)
        if size > self._max_bytes:
            return ids  # It would evict all other entries and itself.
        with self._lock:
            if text not in self._ids:
                self._ids[text] = ids
                self._bytes += size
            while self._bytes > self._max_bytes:
                self._bytes -= _size(*self._ids.popitem(last=False))
        return ids


def _size(text: str, ids: bytes) -> int:
    # Python uses at most four bytes per character.
    return 4 * len(text) + len(ids)
