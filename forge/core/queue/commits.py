"""Which optimizer step committed a batch: what makes a repeated commit harmless.

Owns the names of batches, `batch-<term>-<number>`, and one number for each commit there ever was.
"""

from __future__ import annotations

import re
from array import array
from collections import defaultdict

_BATCH_ID = re.compile(r"batch-(\d{1,18})-(\d{1,18})")
_MOST_SKIPPED = 65_536
"""Numbers of a term that were not committed, between two that were."""
_NONE = -1


class Commits:
    """Step by batch id, 8 bytes for each batch of a term."""

    def __init__(self) -> None:
        self._steps: defaultdict[int, array[int]] = defaultdict(lambda: array("q"))
        """By term, then by number."""
        self._others: dict[str, int] = {}
        """Those whose names are none that a scheduler gives, or far beyond the others."""

    def __contains__(self, batch_id: str) -> bool:
        return self.get(batch_id) is not None

    def get(self, batch_id: str) -> int | None:
        term, number = granted_at(batch_id)
        steps = self._steps.get(term, ())
        known = 0 <= number < len(steps) and batch_id == batch_name(term, number)
        if known and steps[number] != _NONE:
            return steps[number]
        return self._others.get(batch_id)

    def add(self, batch_id: str, step: int) -> None:
        """The last step that is given counts."""
        self._others.pop(batch_id, None)
        term, number = granted_at(batch_id)
        missing = number + 1 - len(self._steps[term]) if term >= 0 else _MOST_SKIPPED + 1
        if missing > _MOST_SKIPPED or batch_id != batch_name(term, number):
            self._others[batch_id] = step
            return
        steps = self._steps[term]
        steps.extend([_NONE] * missing)
        steps[number] = step

    def undo_after(self, step: int) -> None:
        """The commits of later steps never were."""
        for steps in self._steps.values():
            for number, known in enumerate(steps):
                if known > step:
                    steps[number] = _NONE
        self._others = {batch: known for batch, known in self._others.items() if known <= step}


def batch_name(term: int, number: int) -> str:
    return f"batch-{term}-{number}"


def granted_at(batch_id: str) -> tuple[int, int]:
    """Term and number of a batch; before all others for an id that was never given out."""
    match = _BATCH_ID.fullmatch(batch_id)
    return (int(match[1]), int(match[2])) if match else (-1, 0)
