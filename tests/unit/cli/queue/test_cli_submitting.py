"""The file that `forge queue submit` reads, and what a curriculum is asked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from forge.cli.queue.outages import Outages
from forge.cli.queue.submission import Submission
from forge.cli.queue.submitting import Counts, Submitter, load_curriculum
from forge.client.operator import Operator
from forge.core.errors import ConfigError, InvalidArgument
from forge.v1 import common_pb2, scheduler_pb2

OUTAGES = Outages(print, longest_s=0.0)


class Queue(Operator):
    """An operator's view of a queue that begins each group at once, and stops after some."""

    def __init__(self, *, calls: int = 1000) -> None:
        self.tasks: list[common_pb2.Task] = []
        self._calls = calls

    async def scheduler_status(self, **_: Any) -> scheduler_pb2.GetSchedulerStatusResponse:
        domains = [scheduler_pb2.DomainStatus(domain="qa", recent_reward=0.5)]
        return scheduler_pb2.GetSchedulerStatusResponse(domains=domains)

    async def submit(self, tasks: Any) -> int:
        if not self._calls:
            raise KeyboardInterrupt
        self._calls -= 1
        found = list(tasks)
        self.tasks += found
        return len(found)

    async def groups(self, tag: str) -> Any:
        for task in self.tasks:
            if task.tag == tag:
                record = common_pb2.GroupRecord(task=task)
                yield scheduler_pb2.BatchGroup(group=record)


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def make_submission(file: Path, **changed: Any) -> Submission:
    given: dict[str, Any] = {"name": "set", "shuffle": False, "queued": 2}
    return Submission(file=file, domain="qa", group_size=4, **(given | changed))


async def submit(queue: Queue, submission: Submission) -> Counts:
    submitter = Submitter(submission, OUTAGES)
    await submitter.run(queue, lambda *_: None)
    return submitter.counts


def hardest_first(candidates: Any, rewards: Any) -> list[int]:
    assert rewards == {"qa": 0.5}
    return sorted(range(len(candidates)), key=lambda at: -candidates[at].difficulty)


def nothing(candidates: Any, rewards: Any) -> list[int]:
    return []


async def test_interrupted_submission_is_continued(tmp_path: Path) -> None:
    """Each line once per epoch, in the order of the file, also after an interruption."""
    file = write(tmp_path / "t.jsonl", *({"payload": {"n": n}} for n in range(5)))
    queue = Queue(calls=2)
    with pytest.raises(KeyboardInterrupt):
        await submit(queue, make_submission(file, epochs=2))
    assert len(queue.tasks) == 4
    queue._calls = 1000
    await submit(queue, make_submission(file, epochs=2))
    expected = [f"set.e{epoch}.r{row}" for epoch in range(2) for row in range(5)]
    assert [task.task_id for task in queue.tasks] == expected
    assert {task.tag for task in queue.tasks} == {"set"}


async def test_curriculum_chooses_the_order(tmp_path: Path) -> None:
    """It gets difficulty and recent rewards; one that chooses no row does not halt training."""
    rows = [{"payload": {}, "difficulty": level} for level in (0.1, 0.9, 0.5)]
    file = write(tmp_path / "t.jsonl", *rows)
    queue = Queue()
    hook = f"{__name__}:hardest_first"
    await submit(queue, make_submission(file, curriculum=hook))
    assert [task.task_id for task in queue.tasks] == ["set.e0.r1", "set.e0.r2", "set.e0.r0"]
    queue = Queue()
    hook = f"{__name__}:nothing"
    await submit(queue, make_submission(file, curriculum=hook))
    assert len(queue.tasks) == 3


def silent(candidates: Any, rewards: Any) -> None:
    """A hook whose author forgot to return anything."""


async def test_curriculum_that_returns_no_positions_is_an_error(tmp_path: Path) -> None:
    """The line names the hook and its return value."""
    submission = make_submission(
        write(tmp_path / "t.jsonl", {"payload": {}}), curriculum=f"{__name__}:silent"
    )
    with pytest.raises(InvalidArgument, match="silent returned None; positions are expected"):
        await submit(Queue(), submission)


def test_every_problem_of_a_submission_is_a_line(tmp_path: Path) -> None:
    """Before a connection: of both files and the curriculum."""
    file = write(tmp_path / "t.jsonl", {"payload": 1})
    submission = make_submission(file, held_out=tmp_path / "none", curriculum="no_module:choose")
    with pytest.raises(InvalidArgument) as refused:
        Submitter(submission, OUTAGES)
    assert str(refused.value).splitlines() == [
        f"{file}, line 1: must be a JSON object with an object `payload`",
        f"{tmp_path}/none: No such file or directory",
        "no_module:choose: cannot import no_module: No module named 'no_module'",
    ]


def test_data_set_with_a_held_out_task_is_refused(tmp_path: Path) -> None:
    """Before submission, naming both lines; for any spelling of the payload, and only in the domain
    that holds it out."""
    rows = [{"payload": {"n": 1}}, {"payload": {"n": 2, "m": 3}}]
    file = write(tmp_path / "t.jsonl", *rows)
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text(
        '{"domain": "code", "payload": {"n": 1}}\n\n{"domain": "qa", "payload": {"m":3, "n":2}}\n'
    )
    with pytest.raises(InvalidArgument, match=r"t\.jsonl, task 2 .*held_out\.jsonl, task 2"):
        Submitter(make_submission(file, held_out=held_out), OUTAGES)
    write(held_out, {"domain": "qa", "payload": {"n": 2}})
    Submitter(make_submission(file, held_out=held_out), OUTAGES)


def test_invalid_curriculum_is_refused() -> None:
    """Before submission."""
    with pytest.raises(ConfigError, match="is not a function"):
        load_curriculum("math:pi")
