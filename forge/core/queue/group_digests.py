"""The names of groups that are not held in memory any more, as digests.

Owns the one thing that is kept of such a group by name: enough to tell that an id was used before,
and whether with the same content. All else about it is in the pool, and in counters.
"""

from __future__ import annotations

from hashlib import blake2b

ID_BYTES = 16
"""Of the digest of a name: two of a billion names share one with a probability below 1e-20."""
CONTENT_BYTES = 8
"""Of the digest of the content."""
_BUCKETS = 1 << 14
_RECORD_BYTES = ID_BYTES + CONTENT_BYTES


class Forgotten:
    """Names, each with the first `CONTENT_BYTES` of a digest. Nothing leaves.

    24 bytes for each name, and the room that a growing array leaves free. A look-up searches one
    of 16,384 buckets.
    """

    def __init__(self) -> None:
        self._buckets: dict[int, bytearray] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, name: str) -> bool:
        return self._count > 0 and self.content(name) is not None

    def add(self, name: str, content: bytes) -> None:
        """A name that is known is left as it is. `content`: a digest, cut or padded."""
        if name in self:
            return
        key = _key(name)
        bucket = self._buckets.setdefault(_bucket_of(key), bytearray())
        bucket += key + content[:CONTENT_BYTES].ljust(CONTENT_BYTES, b"\0")
        self._count += 1

    def content(self, name: str) -> bytes | None:
        """The `CONTENT_BYTES` that came with a name; None for one that was not added."""
        key = _key(name)
        bucket = self._buckets.get(_bucket_of(key), b"")
        at = bucket.find(key)
        while at % _RECORD_BYTES and at >= 0:
            at = bucket.find(key, at + 1)
        return bytes(bucket[at + ID_BYTES : at + _RECORD_BYTES]) if at >= 0 else None

    def size_bytes(self) -> int:
        """Of the records."""
        return self._count * _RECORD_BYTES


def _key(name: str) -> bytes:
    return blake2b(name.encode(), digest_size=ID_BYTES).digest()


def _bucket_of(key: bytes) -> int:
    return int.from_bytes(key[:2], "big") % _BUCKETS
