"""The optimizer step that committed each batch, which makes commits idempotent.

Owns the names of batches, `batch-<term>-<number>`, and one number for each commit.
"""

from __future__ import annotations

import re
from array import array
from collections import defaultdict

_BATCH_ID = re.compile(r"batch-(\d{1,18})-(\d{1,18})")
_MOST_SKIPPED = 65_536
"""Most uncommitted numbers of a term between two committed ones."""
_NONE = -1


class Commits:
    """Step by batch id, 8 bytes for each batch of a term."""

    def __init__(self) -> None:
        self._steps: defaultdict[int, array[int]] = defaultdict(lambda: array("q"))
        """By term, then by number."""
        self._others: dict[str, int] = {}
        """Batches with a name of another form, or with a number far beyond the others."""

    def __contains__(self, batch_id: str) -> bool:
        return self.get(batch_id) is not None

    def get(self, batch_id: str) -> int | None:
        """The step, or None."""
        term, number = granted_at(batch_id)
        steps = self._steps.get(term, ())
        known = 0 <= number < len(steps) and batch_id == batch_name(term, number)
        if known and steps[number] != _NONE:
            return steps[number]
        return self._others.get(batch_id)

    def add(self, batch_id: str, step: int) -> None:
        """Adds a commit; the last step of a batch counts."""
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
        """Forget the commits of later steps."""
        for steps in self._steps.values():
            for number, known in enumerate(steps):
                if known > step:
                    steps[number] = _NONE
        self._others = {batch: known for batch, known in self._others.items() if known <= step}


def batch_name(term: int, number: int) -> str:
    """The id of a batch."""
    return f"batch-{term}-{number}"


def granted_at(batch_id: str) -> tuple[int, int]:
    """Term and number of a batch; (-1, 0) for an id of another form."""
    match = _BATCH_ID.fullmatch(batch_id)
    return (int(match[1]), int(match[2])) if match else (-1, 0)
