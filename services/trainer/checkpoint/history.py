"""The history of a run: metrics of steps, and evaluations, in the order of their arrival.

Owns the file format: one line of JSON per entry. `services.trainer.reporting.run_record` and
`services.trainer.checkpoint.store` own the files.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeVar

from google.protobuf.message import Message

from forge.v1 import trainer_pb2 as pb

EVALUATION = "evaluation"
"""The single key of an evaluation's line; elsewhere the prefix of an evaluation's numbers."""

MALFORMED = (ValueError, TypeError, AttributeError)
"""Errors that reading a malformed line raises."""

Entry = pb.StepMetrics | pb.Evaluation
M = TypeVar("M", bound=Message)


class CheckpointHistory:
    """The entries of one lineage, append-only; a restore begins another lineage."""

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        self._entries = list(entries)

    def add(self, entry: Entry) -> None:
        """Append an entry, which must not change any more."""
        self._entries.append(entry)

    def until(self, step: int, *, after: int = 0) -> list[Entry]:
        """Entries before the step that follows `step`, without the first `after` entries."""

        def earlier(entry: Entry) -> bool:
            return not isinstance(entry, pb.StepMetrics) or entry.step <= step

        return list(takewhile(earlier, self._entries[after:]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """The valid length of a history's file."""

    entries: int = 0
    size_bytes: int = 0


def extend(file: Path, extent: Extent, entries: Sequence[Entry]) -> Extent:
    """Append entries to a file, after truncating it to its valid length.

    Raises `OSError`, for example when the disk is full; the valid part of the file stays.
    """
    text = "".join(map(_to_line, entries)).encode()
    with file.open("ab") as lines:
        if lines.tell() > extent.size_bytes:
            lines.truncate(extent.size_bytes)
        lines.write(text)
    return Extent(entries=extent.entries + len(entries), size_bytes=extent.size_bytes + len(text))


def _to_line(entry: Entry) -> str:
    fields = _to_json(entry)
    return json.dumps(fields if isinstance(entry, pb.StepMetrics) else {EVALUATION: fields}) + "\n"


def from_json(fields: Mapping[str, Any]) -> Entry:
    """The entry of a line's JSON value. Raises one of `MALFORMED`."""
    if EVALUATION in fields:
        return _filled(pb.Evaluation(), fields[EVALUATION])
    return _filled(pb.StepMetrics(), fields)


def _to_json(metrics: Message) -> dict[str, Any]:
    """Every field, 64-bit integers as numbers; protobuf's own JSON does neither."""
    fields: dict[str, Any] = {}
    for field in metrics.DESCRIPTOR.fields:
        value = getattr(metrics, field.name)
        if field.is_repeated:
            value = {
                key: _to_json(entry) if isinstance(entry, Message) else entry
                for key, entry in value.items()
            }
        fields[field.name] = value
    return fields


def _filled(metrics: M, fields: Mapping[str, Any]) -> M:
    """`metrics` with the fields that `_to_json` returned; protobuf's own parser refuses NaN."""
    for name, value in fields.items():
        if name not in metrics.DESCRIPTOR.fields_by_name:
            # A field of another release.
            continue
        if not isinstance(value, dict):
            setattr(metrics, name, value)
            continue
        entries = getattr(metrics, name)
        for key, entry in value.items():
            if isinstance(entry, dict):
                _filled(entries[key], entry)
            else:
                entries[key] = entry
    return metrics
