"""Damage that no checksum tells of: records deleted from a closed shard, or moved within it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lmdb

from services.pool.storage.tables import Table


def delete_record(data_dir: Path, table: Table, key: bytes) -> None:
    with _writing(data_dir, table) as (transaction, database):
        assert transaction.delete(key, db=database)


def put_raw(data_dir: Path, table: Table, key: bytes, value: bytes) -> None:
    """The value as it lies on disk, checksum and all."""
    with _writing(data_dir, table) as (transaction, database):
        transaction.put(key, value, db=database)


def raw_value(data_dir: Path, table: Table, key: bytes) -> bytes:
    with _writing(data_dir, table) as (transaction, database):
        return bytes(transaction.get(key, db=database))


def flip_key(data_dir: Path, table: Table, key: bytes, *, byte: int = -1) -> bytes:
    """Stores the record under its key with one bit flipped; that key."""
    flipped = bytearray(key)
    flipped[byte] ^= 1
    with _writing(data_dir, table) as (transaction, database):
        value = transaction.pop(key, db=database)
        assert value is not None
        transaction.put(bytes(flipped), value, db=database)
    return bytes(flipped)


@contextmanager
def _writing(data_dir: Path, table: Table) -> Iterator[tuple[Any, Any]]:
    with lmdb.open(str(data_dir), max_dbs=len(Table), map_size=1 << 30) as environment:
        database = environment.open_db(table.value.encode(), create=False)
        with environment.begin(write=True) as transaction:
            yield transaction, database


def flip_served(data_dir: Path, needle: bytes) -> None:
    """Flips a bit of each place where the file of a shard that is served has `needle`."""
    path = data_dir / "data.mdb"
    with path.open("r+b") as file:
        data = file.read()
        places = [found.start() for found in re.finditer(re.escape(needle), data)]
        assert places
        for place in places:
            # In place: the process that serves it reads the file through its map.
            file.seek(place)
            file.write(bytes([needle[0] ^ 1]))
