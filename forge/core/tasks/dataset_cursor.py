"""The position in a data set: epochs, seeded shuffling, and the rows to submit next.

Each row comes once per epoch; an epoch begins after all rows of the one before are submitted. No
state is stored: a task id names data set, epoch and row, the pool stores task ids, and seed and
epoch determine the order. So a cursor built from the submitted ids continues at the same position;
their order does not matter.

Pure; the caller runs the curriculum, which chooses among the rows that the cursor offers.
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
    """Return the task id of a place. Raises InvalidArgument for a wrong name."""
    task_id = f"{name}.e{place.epoch}.r{place.row}"
    check_task_id(task_id)
    return TaskId(task_id)


def place_of(name: str, task_id: str) -> Place | None:
    """Return the place of a task; None for a task of another data set than `name`."""
    found = _PLACE.fullmatch(task_id)
    return Place(int(found[2]), int(found[3])) if found and found[1] == name else None


def any_place_of(task_id: str) -> Place | None:
    """Return the place of a task in its data set; None for a task of no file."""
    found = _PLACE.fullmatch(task_id)
    return Place(int(found[2]), int(found[3])) if found else None


class DatasetCursor:
    """The position in one data set."""

    def __init__(
        self,
        *,
        rows: int,
        epochs: int,
        seed: int,
        shuffle: bool = True,
        submitted: Iterable[Place] = (),
    ) -> None:
        """`epochs` 0: endless. Raises InvalidArgument for an empty data set, or for a submitted row
        beyond its end: then the data set is another one."""
        if rows < 1:
            raise InvalidArgument("the data set has no rows")
        self._rows = rows
        self._epochs = epochs
        self._seed = seed
        self._shuffle = shuffle
        self._done: defaultdict[int, set[int]] = defaultdict(set)
        """Submitted rows by unfinished epoch."""
        for place in submitted:
            if place.row >= rows:
                raise InvalidArgument(
                    f"row {place.row} was submitted and the data set has {rows} rows: another file?"
                )
            self._done[place.epoch].add(place.row)
        self.epoch = 0
        """Epoch of the next rows."""
        self._waiting = self._order()
        self._next_epoch()

    @property
    def finished(self) -> bool:
        """Whether all rows of all epochs were submitted."""
        return not self._waiting

    def waiting(self, limit: int) -> Sequence[Place]:
        """Return up to `limit` unsubmitted places of this epoch, in order; none at the end."""
        return [Place(self.epoch, row) for row in self._waiting[:limit]]

    def submitted(self, places: Iterable[Place]) -> None:
        """Record submitted places of this epoch, in any order."""
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
    """Return the first `limit` places of a curriculum's choice, positions in `waiting`.

    Raises InvalidArgument for an unknown or repeated position.
    """
    if len(set(choice)) != len(choice):
        raise InvalidArgument("the curriculum chose the same task twice")
    for position in choice:
        if not 0 <= position < len(waiting):
            raise InvalidArgument(
                f"the curriculum chose position {position} of {len(waiting)} candidates"
            )
    return [waiting[position] for position in choice[:limit]]
