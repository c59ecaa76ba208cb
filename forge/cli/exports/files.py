"""Files of an export: JSON Lines or Parquet, complete under their name or absent.

Owns both encodings; a `RowFormat` has the columns. Memory holds one row group, about
ROW_GROUP_BYTES, or one row if that is larger.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, Generic, Protocol, TypeVar

import msgspec

from forge.core.errors import FailedPrecondition, InvalidArgument, NotFound, ResourceExhausted
from forge.runtime.files.sync import sync
from forge.runtime.files.unfinished import lock_unfinished, unfinished

ROW_GROUP_BYTES = 32 << 20
SUFFIXES = (".parquet", ".jsonl")

Row = TypeVar("Row")
_In = TypeVar("_In", contravariant=True)


class RowFormat(Protocol[_In]):
    """The columns of one kind of rows."""

    def size_bytes(self, row: _In, /) -> int:
        """Returns the size of a row in memory, about."""

    def json_row(self, row: _In, /) -> dict[str, Any]:
        """Returns a row as plain data."""

    def table(self, arrow: Arrow, rows: Sequence[_In], /) -> Any:
        """Returns rows as a table of pyarrow; without rows it has the columns alone."""


@contextmanager
def export_file(path: Path, rows: RowFormat[Row]) -> Iterator[JsonLines[Row] | Parquet[Row]]:
    """Opens a new file; its suffix selects the encoding.

    The file gets its name when it is complete and on the disk. Raises `InvalidArgument` for another
    suffix, `FailedPrecondition` when the file exists or another export writes it, `NotFound` when
    the encoding needs a package that is not installed.
    """
    if path.suffix not in SUFFIXES:
        raise InvalidArgument(f"{path} must end with one of {', '.join(SUFFIXES)}")
    if path.exists():
        raise FailedPrecondition(f"{path} exists already: name another file")
    filling = unfinished(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with filling.open("ab") as file:
            # Two writers would mix their rows.
            lock_unfinished(file.fileno(), path)
            try:
                # An export that was killed may have left rows.
                file.truncate(0)
                file.seek(0)
                parquet = path.suffix == ".parquet"
                writer = Parquet(file, rows) if parquet else JsonLines(file, rows)
                yield writer
                writer.close()
                file.flush()
                os.fsync(file.fileno())
                filling.replace(path)
                sync(path.parent)
            except BaseException:
                filling.unlink(missing_ok=True)
                raise
    except OSError as error:
        raise ResourceExhausted(f"{path} cannot be written: {error.strerror}") from None


class JsonLines(Generic[Row]):
    """One JSON object per line."""

    def __init__(self, file: BinaryIO, rows: RowFormat[Row]) -> None:
        self._file = file
        self._rows = rows
        self._encoder = msgspec.json.Encoder()

    def add(self, row: Row, /) -> None:
        """Writes one line."""
        self._file.write(self._encoder.encode(self._rows.json_row(row)))
        self._file.write(b"\n")

    def close(self) -> None:
        """Flushes the file."""
        self._file.flush()


class Parquet(Generic[Row]):
    """Row groups of about ROW_GROUP_BYTES, compressed with zstd."""

    def __init__(self, file: BinaryIO, rows: RowFormat[Row]) -> None:
        self._arrow = Arrow()
        self._file = file
        self._format = rows
        self._writer: Any = None
        self._rows: list[Row] = []
        self._bytes = 0

    def add(self, row: Row, /) -> None:
        """Adds a row; writes a complete row group."""
        self._rows.append(row)
        self._bytes += self._format.size_bytes(row)
        if self._bytes >= ROW_GROUP_BYTES:
            self._write()

    def close(self) -> None:
        """Writes the last row group and the footer."""
        # Without rows the file has columns alone.
        if self._rows or self._writer is None:
            self._write()
        self._writer.close()

    def _write(self) -> None:
        table = self._format.table(self._arrow, self._rows)
        if self._writer is None:
            self._writer = self._arrow.parquet.ParquetWriter(
                self._file, table.schema, compression="zstd"
            )
        self._writer.write_table(table)
        self._rows, self._bytes = [], 0


class Arrow:
    """Makes columns of pyarrow."""

    def __init__(self) -> None:
        """Raises `NotFound` if pyarrow is not installed."""
        try:
            import pyarrow
            from pyarrow import parquet
        except ImportError:
            raise NotFound(
                "Parquet needs pyarrow: install it with `pip install 'forge-rl[export]'`, or "
                "export to .jsonl"
            ) from None
        self.pa = pyarrow
        self.parquet = parquet

    def plain(self, rows: Sequence[dict[str, Any]], types: dict[str, Any]) -> dict[str, Any]:
        """Returns one column per type, from rows with the same keys."""
        return {name: self.pa.array([row[name] for row in rows], types[name]) for name in types}

    def struct(self, rows: Sequence[dict[str, Any]], types: dict[str, Any]) -> Any:
        """Returns one column of structs."""
        arrays = self.plain(rows, types)
        return self.pa.StructArray.from_arrays(list(arrays.values()), list(arrays))

    def numbers(self, pieces: Sequence[bytes], kind: Any) -> Any:
        """Returns one list of numbers per piece of little-endian bytes, without a conversion."""
        width = kind.bit_width // 8
        joined = b"".join(pieces)
        values = self.pa.Array.from_buffers(
            kind, len(joined) // width, [None, self.pa.py_buffer(joined)]
        )
        return self.lists([len(piece) // width for piece in pieces], values)

    def lists(self, lengths: Sequence[int], values: Any) -> Any:
        """Returns one list per length, of consecutive values."""
        offsets = self.pa.array([0, *accumulate(lengths)], self.pa.int32())
        return self.pa.ListArray.from_arrays(offsets, values)
