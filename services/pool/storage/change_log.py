"""The change log of a shard: the order in which trajectories were closed and rewarded later.

Owns the numbers of the log, its encoding and the search by time. A trajectory has at most two
entries, named in its header: its close, and its latest reward since, which replaces the one before.
Deleting a trajectory deletes its entries.

Entry times never decrease, even if the host's clock went back: every trajectory closed at or after
a time is behind the first entry with that time.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import IntEnum

import msgspec

from forge.runtime.telemetry import log
from services.pool.storage.records import DamagedRecord, Payload, Records, TrajectoryHeader
from services.pool.storage.tables import Table

_LOG_KEY = b"change_log"
_LOG_END = struct.Struct(">Qd")
"""Newest number given, and its time."""
_NUMBER = struct.Struct(">Q")
_SKIPPED = 1 << 32
"""Numbers left out after the newest one was lost."""


class ChangeKind(IntEnum):
    """As stored, and as in pool.proto."""

    CLOSED = 1
    REWARDED = 2


class TrajectoryChange(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """One entry of the log."""

    kind: int
    trajectory: bytes
    """Key of the trajectory."""
    logged_unix_s: float


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(TrajectoryChange)


def change_key(number: int) -> bytes:
    """Key of an entry."""
    return _NUMBER.pack(number)


def number_of_change_key(key: bytes) -> int:
    """Number of an entry."""
    number: int = _NUMBER.unpack(key)[0]
    return number


def newest_change(records: Records) -> int:
    """Number of the newest entry ever written; 0 before the first."""
    return _log_end(records)[0]


def decode_change(payload: Payload) -> TrajectoryChange:
    """Decodes an entry."""
    return _decoder.decode(payload)


def log_closed(records: Records, trajectory: bytes, header: TrajectoryHeader) -> TrajectoryHeader:
    """Logs the close of `trajectory`; `header` with the number of the entry."""
    number = _append(records, ChangeKind.CLOSED, trajectory, header.sealed_unix_s)
    return msgspec.structs.replace(header, closed_change=number)


def log_rewarded(records: Records, trajectory: bytes, header: TrajectoryHeader) -> TrajectoryHeader:
    """Logs a reward of closed `trajectory`; `header` with the number of the entry."""
    if header.rewarded_change:
        records.delete(Table.CHANGES, change_key(header.rewarded_change))
    number = _append(records, ChangeKind.REWARDED, trajectory, 0.0)
    return msgspec.structs.replace(header, rewarded_change=number)


def delete_changes(records: Records, header: TrajectoryHeader) -> None:
    """Deletes the entries of a trajectory."""
    for number in (header.closed_change, header.rewarded_change):
        if number:
            records.delete(Table.CHANGES, change_key(number))


def _append(records: Records, kind: ChangeKind, trajectory: bytes, unix_s: float) -> int:
    try:
        number, newest_unix_s = _log_end(records)
    except DamagedRecord as error:
        log.error("change_log_end_damaged", error=str(error))
        number, newest_unix_s = _lost_log_end(records)
    change = TrajectoryChange(
        kind=kind, trajectory=trajectory, logged_unix_s=max(unix_s, newest_unix_s)
    )
    records.put(Table.CHANGES, change_key(number + 1), _encoder.encode(change))
    records.put(Table.META, _LOG_KEY, _LOG_END.pack(number + 1, change.logged_unix_s))
    return number + 1


def _log_end(records: Records) -> tuple[int, float]:
    stored = records.get(Table.META, _LOG_KEY)
    return (0, 0.0) if stored is None else _LOG_END.unpack(stored)


def _lost_log_end(records: Records) -> tuple[int, float]:
    """A number above all that were given: entries behind the last one may have been deleted."""
    newest = next(records.keys_backwards(Table.CHANGES, prefix=b"\0"), change_key(0))
    number = number_of_change_key(newest)
    times = [change.logged_unix_s for _, change in changes_after(records, max(number - 1, 0))]
    return number + _SKIPPED, max(times, default=0.0)


def changes_after(records: Records, number: int) -> Iterator[tuple[int, TrajectoryChange]]:
    """Entries with higher numbers, in order."""
    for key, payload in records.scan(Table.CHANGES, after=change_key(number)):
        yield number_of_change_key(key), decode_change(payload)


def number_before(records: Records, unix_s: float) -> int:
    """A number behind which every trajectory closed at or after `unix_s` is logged, and no older
    entry as far as the clock went forward."""
    low, high = 0, newest_change(records)
    while low < high:
        middle = (low + high) // 2
        found = next(changes_after(records, middle), None)
        if found is None or found[1].logged_unix_s >= unix_s:
            high = middle
        else:
            low = found[0]
    return low
