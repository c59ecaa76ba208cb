"""Values of the store, and the checksum that guards each.

Owns the encoding of records and the view of one transaction as checked records. Every value is

    crc32(key, payload) as u32, payload

and is verified at every read: a flipped bit, a torn page or a value under the wrong key is
`DamagedRecord`, never a wrong token.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from isal.isal_zlib import crc32

from forge.core.errors import DataLoss
from forge.v1 import common_pb2
from services.pool.storage.change_trackers import ChangeListener
from services.pool.storage.tables import CONTENT, Table

Payload = bytes | memoryview
"""A memoryview points into the map: copy what must outlive the transaction."""

_CHECKSUM = struct.Struct("<I")
_TURN_HEAD = struct.Struct("<iIIIii")


class DamagedRecord(DataLoss):
    """A record whose checksum does not match, or a closed trajectory that lacks records."""

    def __init__(self, message: str, *, table: Table, key: bytes) -> None:
        super().__init__(message)
        self.table = table
        self.key = key


class TrajectoryHeader(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """State and counts of a trajectory.

    Stored as an array: a field added at the end, with a default, reads old records.
    """

    state: int = common_pb2.TRAJECTORY_STATE_OPEN
    domain: str = ""
    """Known once sealed."""
    turns: int = 0
    """This and the three below are counted at the seal; before it, from the turns."""
    sampled_tokens: int = 0
    min_weight_version: int = -1
    max_weight_version: int = -1
    sealed_unix_s: float = 0.0
    reason: str = ""
    closed_change: int = 0
    """Number of its closing in the change log; 0 while open."""
    rewarded_change: int = 0
    """Number of its latest reward after that; 0 before the first."""
    turn_bytes: int = 0
    """Bytes of its turns as stored, counted at the seal."""
    freed: bool = False
    """Turns and rewards are freed, or being freed; nothing may be added."""
    outcome: float | None = None
    """Sum of its outcome rewards, once freed; None when it had none."""
    closing_agent_s: float | None = None
    """Seconds from the end of its last turn to the end of the agent; None if unknown."""
    reward_events: int = 0
    """This and the two below are kept from the closing on; see
    `data.closed_digests`."""
    turns_digest: bytes = b""
    """Empty for one that was closed by a version without digests."""
    rewards_digest: bytes = b""
    prompt_tokens: int = 0
    """Tokens that its turns add besides sampled ones; 0 if closed by a version without it."""

    @property
    def is_open(self) -> bool:
        """True before the close."""
        return self.state == common_pb2.TRAJECTORY_STATE_OPEN


_header_encoder = msgspec.msgpack.Encoder()
_header_decoder = msgspec.msgpack.Decoder(TrajectoryHeader)


def encode_header(header: TrajectoryHeader) -> bytes:
    """Encodes a header."""
    return _header_encoder.encode(header)


def decode_header(payload: Payload) -> TrajectoryHeader:
    """Decodes a header."""
    return _header_decoder.decode(payload)


class TurnHead(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a turn for seals and summaries, readable without parsing the turn."""

    turn_index: int
    parent_turn: int
    prefix_tokens: int
    prompt_tokens: int
    sampled_tokens: int
    min_weight_version: int
    """Over the sampled tokens; -1 when there are none."""
    max_weight_version: int

    @property
    def new_tokens(self) -> int:
        """Tokens that the turn adds to its tree."""
        return self.prompt_tokens + self.sampled_tokens


def encode_turn_head(head: TurnHead) -> bytes:
    """The bytes before the serialized Turn."""
    return _TURN_HEAD.pack(
        head.parent_turn,
        head.prefix_tokens,
        head.prompt_tokens,
        head.sampled_tokens,
        head.min_weight_version,
        head.max_weight_version,
    )


def decode_turn_head(turn_index: int, payload: Payload) -> TurnHead:
    """Decodes the head of a stored turn."""
    parent, prefix, prompt, sampled, low, high = _TURN_HEAD.unpack_from(payload)
    return TurnHead(
        turn_index=turn_index,
        parent_turn=parent,
        prefix_tokens=prefix,
        prompt_tokens=prompt,
        sampled_tokens=sampled,
        min_weight_version=low,
        max_weight_version=high,
    )


def turn_of_payload(payload: Payload) -> Payload:
    """The serialized Turn as it arrived."""
    return payload[_TURN_HEAD.size :]


def checksummed_value(key: bytes, *payload: bytes) -> bytes:
    """Returns the record of a payload as it lies on disk: its checksum, then its pieces."""
    checksum = crc32(key)
    for piece in payload:
        checksum = crc32(piece, checksum)
    return b"".join((_CHECKSUM.pack(checksum), *payload))


def checksum_of(key: bytes, payload: Payload) -> bytes:
    """Returns the checksum of a record as it lies on disk before `payload`."""
    return _CHECKSUM.pack(crc32(payload, crc32(key)))


def open_value(table: Table, key: bytes, value: Payload) -> Payload:
    """The payload of `value`; raises `DamagedRecord` when it is not intact."""
    payload = value[_CHECKSUM.size :]
    if len(value) < _CHECKSUM.size or crc32(payload, crc32(key)) != _CHECKSUM.unpack_from(value)[0]:
        message = f"the checksum of record {key!r} in {table.value} does not match"
        raise DamagedRecord(message, table=table, key=key)
    return payload


def intact_header(trajectory: bytes, value: Payload | None) -> TrajectoryHeader | None:
    """The header in a record as stored; None if it is absent or damaged."""
    if value is None:
        return None
    try:
        return decode_header(open_value(Table.TRAJECTORIES, trajectory, value))
    except (DamagedRecord, msgspec.MsgspecError):
        return None


def is_intact_entry(key: bytes, value: bytes) -> bool:
    """True if an index entry, which has no payload, is under its original key."""
    return value == checksum_of(key, b"")


@dataclass(slots=True, kw_only=True)
class Deletions:
    """Turns and rewards that one transaction deletes."""

    limit: int
    limit_bytes: int = 8 << 20
    counts: Counter[Table] = field(default_factory=Counter)
    size_bytes: int = 0

    @property
    def full(self) -> bool:
        """One of the limits is reached."""
        return self.counts.total() >= self.limit or self.size_bytes >= self.limit_bytes


class Records:
    """One LMDB transaction seen as checked records."""

    def __init__(
        self,
        transaction: Any,
        databases: dict[Table, Any],
        listeners: Sequence[ChangeListener] = (),
    ) -> None:
        """`listeners` observe every change."""
        self._transaction = transaction
        self._databases = databases
        self._listeners = listeners

    def get(self, table: Table, key: bytes) -> Payload | None:
        """The payload, None if there is no record. Raises `DamagedRecord`."""
        value = self._transaction.get(key, db=self._databases[table])
        return None if value is None else open_value(table, key, value)

    def meta_text(self, key: bytes) -> str:
        """A text of META; empty if there is none."""
        return bytes(self.get(Table.META, key) or b"").decode()

    def has(self, table: Table, key: bytes) -> bool:
        """Whether there is a record, intact or not."""
        return self._transaction.get(key, db=self._databases[table]) is not None

    def put(self, table: Table, key: bytes, *payload: bytes) -> None:
        """Stores the pieces of `payload` as one record."""
        value = checksummed_value(key, *payload)
        self._transaction.put(key, value, db=self._databases[table])
        self._changed(table, key, value)

    def delete(self, table: Table, key: bytes) -> None:
        """Deletes a record, if it is there."""
        if self._transaction.delete(key, db=self._databases[table]):
            self._changed(table, key, None)

    def get_checksummed(self, table: Table, key: bytes) -> bytes | None:
        """The record as stored, with its checksum."""
        value = self._transaction.get(key, db=self._databases[table])
        return None if value is None else bytes(value)

    def put_checksummed(
        self, table: Table, key: bytes, value: bytes | None, *, replicated: bool = False
    ) -> None:
        """Stores a record as it lies on another disk, None to delete it; `replicated`: followers
        get it with this commit."""
        if value is None:
            self._transaction.delete(key, db=self._databases[table])
        else:
            self._transaction.put(key, value, db=self._databases[table])
        self._changed(table, key, value, replicated=replicated)

    def _changed(
        self, table: Table, key: bytes, value: bytes | None, *, replicated: bool = True
    ) -> None:
        for listener in self._listeners:
            listener.record_changed(table, key, value, replicated=replicated)

    def clear(self, table: Table) -> None:
        """Deletes all records of a table; followers do not get that."""
        self._transaction.drop(self._databases[table], delete=False)
        for listener in self._listeners:
            listener.table_cleared(table)

    def delete_content(self, prefix: bytes, deletions: Deletions) -> None:
        """Deletes turns and rewards whose key starts with `prefix`, up to the limits."""
        for table in CONTENT:
            with self._transaction.cursor(db=self._databases[table]) as cursor:
                found = cursor.set_range(prefix)
                while found and not deletions.full and bytes(cursor.key()).startswith(prefix):
                    deletions.counts[table] += 1
                    deletions.size_bytes += len(cursor.value())
                    self._changed(table, bytes(cursor.key()), None)
                    found = cursor.delete() and bool(cursor.key())

    def scan(
        self, table: Table, *, prefix: bytes = b"", after: bytes = b""
    ) -> Iterator[tuple[bytes, Payload]]:
        """Records whose key starts with `prefix` and is greater than `after`, in key order."""
        for key, value in self._scan(table, prefix, after):
            yield key, open_value(table, key, value)

    def scan_stored(self, table: Table, *, prefix: bytes) -> Iterator[tuple[bytes, bytes, Payload]]:
        """Yields keys, checksums and payloads of `scan`."""
        for key, value in self._scan(table, prefix, b""):
            payload = value[_CHECKSUM.size :]
            checksum = checksum_of(key, payload)
            if value[: _CHECKSUM.size] != checksum:
                open_value(table, key, value)  # Raises.
            yield key, checksum, payload

    def scan_checksummed(
        self, table: Table, *, prefix: bytes = b"", after: bytes = b""
    ) -> Iterator[tuple[bytes, bytes]]:
        """Yields the keys of `scan` with the records as stored, intact or not."""
        for key, value in self._scan(table, prefix, after):
            yield key, bytes(value)

    def keys(self, table: Table, *, prefix: bytes, after: bytes = b"") -> Iterator[bytes]:
        """Keys that start with `prefix` and are greater than `after`, in order; no value is
        read."""
        for key, _ in self._scan(table, prefix, after):
            yield key

    def has_any(self, tables: Iterable[Table], prefix: bytes) -> bool:
        """Whether one of the tables has a key that starts with `prefix`."""
        return any(True for table in tables for _ in self.keys(table, prefix=prefix))

    def keys_backwards(self, table: Table, *, prefix: bytes) -> Iterator[bytes]:
        """Keys that start with `prefix`, the greatest first."""
        behind = prefix[:-1] + bytes([prefix[-1] + 1])
        with self._transaction.cursor(db=self._databases[table]) as cursor:
            found = cursor.prev() if cursor.set_range(behind) else cursor.last()
            while found:
                key = bytes(cursor.key())
                if not key.startswith(prefix):
                    return
                yield key
                found = cursor.prev()

    def _scan(self, table: Table, prefix: bytes, after: bytes) -> Iterator[tuple[bytes, Payload]]:
        with self._transaction.cursor(db=self._databases[table]) as cursor:
            found = cursor.set_range(max(prefix, after))
            while found:
                key = bytes(cursor.key())
                if not key.startswith(prefix):
                    return
                if key != after:
                    yield key, cursor.value()
                found = cursor.next()

    def count(self, table: Table) -> int:
        """Number of records in a table."""
        entries: int = self._transaction.stat(self._databases[table])["entries"]
        return entries
