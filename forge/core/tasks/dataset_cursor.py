"""Which rows of a data set are submitted next: epochs, seeded shuffling, and where it stands.

Each row comes once an epoch, and an epoch begins when all rows of the one before are submitted.
Nothing needs to be kept: a task id names data set, epoch and row, the pool keeps task ids, and the
order is a function of seed and epoch. So a cursor made of the ids that were submitted goes on where
the last one stood, whatever order a curriculum chose.

Pure; a curriculum is asked by the caller, and only orders what the cursor offers.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from random import Random
from typing import NamedTuple

from forge.core.errors import InvalidArgument
from forge.core.trajectory import TaskId, check_task_id

_PLACE = re.compile(r"(.+)\.e(\d+)\.r(\d+)")


class Place(NamedTuple):
    """One row in one epoch, both counted from 0."""

    epoch: int
    row: int


def task_id_of(name: str, place: Place) -> TaskId:
    """Raises InvalidArgument for a name that makes no task id."""
    task_id = f"{name}.e{place.epoch}.r{place.row}"
    check_task_id(task_id)
    return TaskId(task_id)


def place_of(name: str, task_id: str) -> Place | None:
    """None for a task that is not of the data set `name`."""
    found = _PLACE.fullmatch(task_id)
    return Place(int(found[2]), int(found[3])) if found and found[1] == name else None


class DatasetCursor:
    """Where the submission of one data set stands."""

    def __init__(
        self,
        *,
        rows: int,
        epochs: int,
        seed: int,
        shuffle: bool = True,
        submitted: Iterable[Place] = (),
    ) -> None:
        """`epochs` 0: without end. Raises InvalidArgument for an empty data set, or when what was
        submitted has rows that the data set lacks: then it is another one."""
        if rows < 1:
            raise InvalidArgument("the data set has no rows")
        self._rows = rows
        self._epochs = epochs
        self._seed = seed
        self._shuffle = shuffle
        self._done: defaultdict[int, set[int]] = defaultdict(set)
        """Rows submitted, by epoch that is not over."""
        for place in submitted:
            if place.row >= rows:
                raise InvalidArgument(
                    f"row {place.row} was submitted and the data set has {rows} rows: another file?"
                )
            self._done[place.epoch].add(place.row)
        self.epoch = 0
        """Of the rows that come next."""
        self._waiting = self._order()
        self._next_epoch()

    @property
    def finished(self) -> bool:
        """Whether all rows of all epochs were submitted."""
        return not self._waiting

    def waiting(self, limit: int) -> Sequence[Place]:
        """Up to `limit` places of this epoch that are not submitted, in order; none at the end."""
        return [Place(self.epoch, row) for row in self._waiting[:limit]]

    def submitted(self, places: Iterable[Place]) -> None:
        """They were, in whatever order; all of them of this epoch."""
        self._done[self.epoch].update(place.row for place in places)
        self._next_epoch()

    def _next_epoch(self) -> None:
        done = self._done[self.epoch]
        self._waiting = [row for row in self._waiting if row not in done]
        while not self._waiting and (self.epoch + 1 < self._epochs or not self._epochs):
            del self._done[self.epoch]
            self.epoch += 1
            self._waiting = [row for row in self._order() if row not in self._done[self.epoch]]

    def _order(self) -> list[int]:
        order = list(range(self._rows))
        if self._shuffle:
            Random(f"{self._seed}/{self.epoch}").shuffle(order)
        return order


def chosen_of(waiting: Sequence[Place], choice: Sequence[int], limit: int) -> Sequence[Place]:
    """What a curriculum chose: positions in `waiting`, the first `limit` of them.

    Raises InvalidArgument for a position that is not there, or is named twice.
    """
    if len(set(choice)) != len(choice):
        raise InvalidArgument("the curriculum chose the same task twice")
    for position in choice:
        if not 0 <= position < len(waiting):
            raise InvalidArgument(
                f"the curriculum chose position {position} of {len(waiting)} candidates"
            )
    return [waiting[position] for position in choice[:limit]]
