"""`forge queue submit`: submits a file of tasks to a running system, step by step.

Owns the pace, the call of a curriculum and the counts. `forge.core.tasks.dataset_cursor` owns the
order, `forge.client.task_files` the file format, `outages` the wait for the scheduler.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import index
from typing import Any

from forge.agents.environments import DOMAINS
from forge.agents.plugins import load_attribute
from forge.cli.queue.outages import Outages
from forge.cli.queue.submission import Submission
from forge.client.operator import Operator, batches
from forge.client.task_files import read_tasks
from forge.core.errors import ConfigError, InvalidArgument, raise_all
from forge.core.tasks.dataset_cursor import DatasetCursor, Place, chosen_of, place_of, task_id_of
from forge.core.tasks.task_digest import task_digest
from forge.runtime.process.host_check import failures
from forge.v1 import common_pb2, scheduler_pb2

CANDIDATES = 4096
"""Maximum number of rows in one choice of a curriculum."""
SHOWN_REFUSALS = 20
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


@dataclass(slots=True, kw_only=True)
class Counts:
    """The tasks of one submission."""

    phases: Counter[str] = field(default_factory=Counter)
    """Tasks of earlier submissions, by the phase of their group at the start."""
    tombstones: dict[str, scheduler_pb2.TombstoneReason] = field(default_factory=dict)
    """The tombstoned ones, by reason."""
    accepted: int = 0
    """Tasks that this submission added."""
    refused: int = 0
    refusals: list[str] = field(default_factory=list)
    """Reasons of the first `SHOWN_REFUSALS` refused tasks."""

    def add_earlier(self, group: scheduler_pb2.BatchGroup) -> None:
        """Count a group of an earlier submission."""
        record = group.group
        self.phases[group.phase] += 1
        if record.state == common_pb2.GROUP_STATE_TOMBSTONED:
            reason = self.tombstones.setdefault(
                record.reason, scheduler_pb2.TombstoneReason(reason=record.reason)
            )
            reason.groups += 1
            reason.task_id = record.task.task_id

    def refuse(self, reason: str) -> None:
        """Count a task that the scheduler refused."""
        self.refused += 1
        if len(self.refusals) < SHOWN_REFUSALS:
            self.refusals.append(reason)


class Submitter:
    """Submits one data set to its end."""

    def __init__(self, submission: Submission, outages: Outages) -> None:
        """Raises InvalidArgument with a line for each problem of the files and the curriculum."""
        self._outages = outages
        self._submission = submission
        self._tasks: list[common_pb2.Task] = []
        self._curriculum: Curriculum | None = None
        self.counts = Counts()
        raise_all(failures([self._read_tasks, self._check_disjoint, self._load_curriculum]))

    @property
    def rows(self) -> int:
        """Number of tasks in the file."""
        return len(self._tasks)

    async def run(
        self, operator: Operator, on_progress: Callable[[DatasetCursor, Counts], None]
    ) -> None:
        """Submits all rows of all epochs; calls `on_progress` at the start and after each call.

        `operator` makes one attempt of each call. Raises the `ForgeError` that ends the wait for an
        unreachable scheduler.
        """
        outlast = self._outages.outlast
        cursor = await outlast(lambda: self._resume(operator))
        on_progress(cursor, self.counts)
        while not cursor.finished:
            status = await outlast(operator.scheduler_status)
            places = self._choose(cursor, self._submission.queued - status.queued, status)
            for batch in batches(map(self._named, places)):
                await self._submit(operator, batch)
            cursor.submitted(places)
            if places:
                on_progress(cursor, self.counts)
            else:
                await asyncio.sleep(_POLL_S)

    async def _resume(self, operator: Operator) -> DatasetCursor:
        name = self._submission.name
        self.counts, submitted = Counts(), []
        async for group in operator.groups(name):
            place = place_of(name, group.group.task.task_id)
            if place is not None:
                self._check_unchanged(place, group.group)
                submitted.append(place)
                self.counts.add_earlier(group)
        return DatasetCursor(
            rows=len(self._tasks),
            epochs=self._submission.epochs,
            seed=self._submission.seed,
            shuffle=self._submission.shuffle,
            submitted=submitted,
        )

    def _check_unchanged(self, place: Place, group: common_pb2.GroupRecord) -> None:
        """Raises InvalidArgument for a row that is not the submitted task. A group from a scheduler
        of an earlier release has no digest and is not checked."""
        if not group.task_digest or place.row >= self.rows:
            return
        task = self._named(place)
        task.purpose = common_pb2.PURPOSE_TRAIN
        if task_digest(task) != group.task_digest:
            raise InvalidArgument(
                f"{self._submission.file}: task {place.row + 1} is not the one that was submitted "
                f"as {group.task.task_id}: restore the file and its options (--domain, --scaffold, "
                "--group-size), or submit it as a new data set with another --name"
            )

    async def _submit(self, operator: Operator, tasks: Sequence[common_pb2.Task]) -> None:
        """Submits the tasks that the scheduler does not refuse."""
        try:
            await self._outages.outlast(lambda: operator.submit(tasks))
        except InvalidArgument as error:
            if len(tasks) == 1:
                self.counts.refuse(str(error))
                return
            # A call is refused as a whole.
            for task in tasks:
                await self._submit(operator, [task])
        else:
            # Not the answer's count: the repetition of a call that took effect adds no task.
            self.counts.accepted += len(tasks)

    def _read_tasks(self) -> None:
        submission = self._submission
        check = check_payload if submission.check_payloads else lambda _: None
        self._tasks = read_tasks(submission.file, submission.defaults, check=check)
        task_id_of(submission.name, Place(0, len(self._tasks)))

    def _load_curriculum(self) -> None:
        if self._submission.curriculum:
            self._curriculum = load_curriculum(self._submission.curriculum)

    def _check_disjoint(self) -> None:
        """Raises InvalidArgument with the first held-out task."""
        file = self._submission.held_out
        if file is None:
            return
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


def check_payload(task: common_pb2.Task) -> None:
    """Raises InvalidArgument if the task's domain is one of Forge's and cannot use the payload. The
    runner would report a failed rollout for each attempt."""
    domain = DOMAINS.get(task.domain)
    if domain is None:
        return
    try:
        domain.episode(json.loads(task.payload_json))
    except InvalidArgument as error:
        raise InvalidArgument(f"domain {task.domain}: {error}") from None


def _content(task: common_pb2.Task) -> tuple[str, str]:
    """Returns the identity of a task: domain and payload, independent of its spelling."""
    return task.domain, json.dumps(json.loads(task.payload_json), sort_keys=True)
