"""What a run of Weights & Biases has written offline: its file of records."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK_BYTES = 32_768
HEADER_BYTES = 7
FULL, LAST = 1, 4
"""Kinds of the pieces that end a record."""


def history(file: Path) -> list[dict[str, Any]]:
    """Each row of the run: values by name, with the step as `_step`."""
    return [
        {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in row}
        for row in _rows(file.read_bytes())
    ]


def _rows(data: bytes) -> Iterator[Any]:
    # The format of LevelDB's log: pieces with a checksum, a length and a kind, in blocks.
    from wandb.proto import wandb_internal_pb2

    at, record = HEADER_BYTES, b""
    while at + HEADER_BYTES <= len(data):
        left = BLOCK_BYTES - at % BLOCK_BYTES
        if left < HEADER_BYTES:
            at += left
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + HEADER_BYTES])
        record += data[at + HEADER_BYTES : at + HEADER_BYTES + size]
        at += HEADER_BYTES + size
        if kind in (FULL, LAST):
            found = wandb_internal_pb2.Record.FromString(record)
            record = b""
            if found.WhichOneof("record_type") == "history":
                yield found.history.item
