"""`forge queue submit`: submits a file of tasks to a running system, step by step.

Owns the pace and the call of a curriculum. `forge.core.tasks.dataset_cursor` owns the order,
`forge.client.task_files` the file format.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import index
from pathlib import Path
from typing import Any

from forge.agents.plugins import load_attribute
from forge.cli.submission import Submission
from forge.client.operator import Operator
from forge.client.task_files import read_tasks
from forge.core.errors import ConfigError, InvalidArgument
from forge.core.tasks.dataset_cursor import DatasetCursor, Place, chosen_of, place_of, task_id_of
from forge.v1 import common_pb2

CANDIDATES = 4096
"""Maximum number of rows in one choice of a curriculum."""
_POLL_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """The facts of a row for a curriculum."""

    row: int
    """Line of the file, from 0."""
    epoch: int
    domain: str
    difficulty: float
    payload: Mapping[str, Any]


Curriculum = Callable[[Sequence[Candidate], Mapping[str, float]], Sequence[int]]
"""Returns the positions of the candidates to submit, in order, from the candidates and the recent
reward by domain. Other candidates are offered again; each row is submitted once per epoch."""


def load_curriculum(reference: str) -> Curriculum:
    """Returns the function. Raises ConfigError if it does not exist."""
    curriculum: Curriculum = load_attribute(reference)
    if not callable(curriculum):
        raise ConfigError(f"curriculum: {reference} is not a function")
    return curriculum


class Submitter:
    """Submits one data set to its end."""

    def __init__(self, operator: Operator, submission: Submission) -> None:
        """Raises InvalidArgument, ConfigError."""
        self._operator = operator
        self._submission = submission
        self._tasks = read_tasks(submission.file, submission.defaults)
        if submission.held_out is not None:
            self._check_disjoint(submission.held_out)
        self._curriculum = load_curriculum(submission.curriculum) if submission.curriculum else None
        task_id_of(submission.name, Place(0, len(self._tasks)))
        self.accepted = 0

    async def run(self, on_progress: Callable[[DatasetCursor, int], None]) -> None:
        """Submits all rows of all epochs; calls `on_progress` after each submission."""
        cursor = await self._resume()
        while not cursor.finished:
            status = await self._operator.scheduler_status()
            places = self._choose(cursor, self._submission.queued - status.queued, status)
            if places:
                self.accepted += await self._operator.submit(map(self._named, places))
                cursor.submitted(places)
                on_progress(cursor, self.accepted)
            else:
                await asyncio.sleep(_POLL_S)

    async def _resume(self) -> DatasetCursor:
        name = self._submission.name
        submitted = [
            place
            async for group in self._operator.groups(name)
            if (place := place_of(name, group.group.task.task_id)) is not None
        ]
        return DatasetCursor(
            rows=len(self._tasks),
            epochs=self._submission.epochs,
            seed=self._submission.seed,
            shuffle=self._submission.shuffle,
            submitted=submitted,
        )

    def _check_disjoint(self, file: Path) -> None:
        """Raises InvalidArgument with the first held-out task."""
        tasks = read_tasks(file, self._submission.defaults)
        held_out = {_content(task): number for number, task in enumerate(tasks, 1)}
        for number, task in enumerate(self._tasks, 1):
            if same := held_out.get(_content(task)):
                raise InvalidArgument(
                    f"{self._submission.file}, task {number} ({task.domain}) is held out: "
                    f"it is {file}, task {same}"
                )

    def _choose(self, cursor: DatasetCursor, room: int, status: Any) -> Sequence[Place]:
        if room <= 0:
            return []
        if self._curriculum is None:
            return cursor.waiting(room)
        waiting = cursor.waiting(CANDIDATES)
        rewards = {each.domain: each.recent_reward for each in status.domains}
        answer = self._curriculum([self._candidate(place) for place in waiting], rewards)
        try:
            choice = [index(position) for position in answer]
        except TypeError:
            raise InvalidArgument(
                f"{self._submission.curriculum} returned {answer!r:.80}; positions are expected"
            ) from None
        chosen = chosen_of(waiting, choice, room)
        # Without groups in the queue no reward would ever change the choice.
        return chosen or (waiting[:1] if not status.queued and not status.running_groups else [])

    def _candidate(self, place: Place) -> Candidate:
        task = self._tasks[place.row]
        return Candidate(
            row=place.row,
            epoch=place.epoch,
            domain=task.domain,
            difficulty=task.difficulty,
            payload=json.loads(task.payload_json),
        )

    def _named(self, place: Place) -> common_pb2.Task:
        task = common_pb2.Task()
        task.CopyFrom(self._tasks[place.row])
        task.task_id = task_id_of(self._submission.name, place)
        task.tag = self._submission.name
        return task


def _content(task: common_pb2.Task) -> tuple[str, str]:
    """Returns the identity of a task: domain and payload, independent of its spelling."""
    return task.domain, json.dumps(json.loads(task.payload_json), sort_keys=True)
