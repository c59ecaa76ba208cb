"""One block of keys and values as a file: a header that names it, its length and its checksum.

A reader believes nothing that it has not checked: files come from other hosts, other releases and
from disks that were full.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Literal

import xxhash

MAGIC = b"forgekv1"
_HEADER = struct.Struct("<8s16s16sQ16s")
"""Magic, identity of model and weights, chain hash, length of the content, its checksum."""

Defect = Literal["foreign", "truncated", "corrupt"]


class BadBlock(Exception):
    """A file that is not the block of its name."""

    def __init__(self, defect: Defect) -> None:
        super().__init__(defect)
        self.defect: Defect = defect


def file_bytes(content: bytes | memoryview) -> int:
    """Return the size of the file of a block."""
    return _HEADER.size + len(content)


def write_block(path: Path, content: bytes | memoryview, *, identity: bytes, chain: bytes) -> None:
    """Fill a file that exists with a block. Raises OSError.

    It is not synced: a block that a power failure tears is found by its checksum.
    """
    checksum = xxhash.xxh3_128_digest(content)
    with path.open("r+b") as file:
        file.write(_HEADER.pack(MAGIC, identity, chain, len(content), checksum))
        file.write(content)


def read_block(path: Path, *, identity: bytes, chain: bytes) -> memoryview | None:
    """Return the content, None without a file. Raises BadBlock, and OSError."""
    try:
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            header = file.read(_HEADER.size)
            if len(header) < _HEADER.size:
                raise BadBlock("truncated")
            magic, found_identity, found_chain, length, checksum = _HEADER.unpack(header)
            if (magic, found_identity, found_chain) != (MAGIC, identity, chain):
                raise BadBlock("foreign")
            if size != _HEADER.size + length:
                raise BadBlock("truncated")
            content = memoryview(bytearray(length))
            filled = 0
            # One read has at most 2 GiB.
            while filled < length and (read := file.readinto(content[filled:])):
                filled += read
    except FileNotFoundError:
        return None
    if filled < length:
        raise BadBlock("truncated")
    if xxhash.xxh3_128_digest(content) != checksum:
        raise BadBlock("corrupt")
    return content
