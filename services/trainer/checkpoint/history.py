"""The history of a run: the metrics of every step, and every evaluation, in the order they came.

Owns what its entries are in files, a line of JSON each. Where these files are is the business of
`services.trainer.reporting.run_record` and `services.trainer.checkpoint.store`.
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
"""The one key of an entry that is no step's; elsewhere it is before the names of its numbers."""

MALFORMED = (ValueError, TypeError, AttributeError)
"""What reading a line raises that is not one of these."""

Entry = pb.StepMetrics | pb.Evaluation
M = TypeVar("M", bound=Message)


class History:
    """Of one lineage: it only grows, and what goes on from a checkpoint is another."""

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        self._entries = list(entries)

    def add(self, entry: Entry) -> None:
        """The newest; nothing changes it any more."""
        self._entries.append(entry)

    def until(self, step: int, *, after: int = 0) -> list[Entry]:
        """All that came before the step that follows `step`, but for the first `after` entries."""

        def earlier(entry: Entry) -> bool:
            return not isinstance(entry, pb.StepMetrics) or entry.step <= step

        return list(takewhile(earlier, self._entries[after:]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """How far a file of a history is good."""

    entries: int = 0
    size_bytes: int = 0


def extend(file: Path, extent: Extent, entries: Sequence[Entry]) -> Extent:
    """Add entries to a file, and cut off first what an attempt that failed has left there.

    Raises `OSError`, a full disk's among them; the file is as good as before then.
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
    """Of a line's value. Raises `MALFORMED` for what is no entry's."""
    if EVALUATION in fields:
        return _filled(pb.Evaluation(), fields[EVALUATION])
    return _filled(pb.StepMetrics(), fields)


def _to_json(metrics: Message) -> dict[str, Any]:
    """Numbers as numbers and every field, which protobuf's own JSON has neither of."""
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
    """`metrics` with what `_to_json` made of another: protobuf's own parser takes no NaN."""
    for name, value in fields.items():
        if name not in metrics.DESCRIPTOR.fields_by_name:
            # A trainer of another version measured it.
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
