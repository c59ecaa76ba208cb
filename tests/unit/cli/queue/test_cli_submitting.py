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
from forge.core.tasks.task_digest import task_digest
from forge.v1 import common_pb2, scheduler_pb2

OUTAGES = Outages(print, longest_s=0.0)


class Queue(Operator):
    """An operator's view of a queue that begins each group at once, and stops after some."""

    def __init__(self, *, calls: int = 1000, digests: bool = True) -> None:
        """`digests`: the scheduler's groups have digests of their tasks."""
        self.tasks: list[common_pb2.Task] = []
        self._calls = calls
        self._digests = digests

    async def scheduler_status(self, **_: Any) -> scheduler_pb2.GetSchedulerStatusResponse:
        domains = [scheduler_pb2.DomainStatus(domain="web", recent_reward=0.5)]
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
                stored = common_pb2.Task(purpose=common_pb2.PURPOSE_TRAIN)
                stored.MergeFrom(task)
                digest = task_digest(stored) if self._digests else b""
                stored.payload_json = ""
                record = common_pb2.GroupRecord(task=stored, task_digest=digest)
                yield scheduler_pb2.BatchGroup(group=record)


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def make_submission(file: Path, **changed: Any) -> Submission:
    given: dict[str, Any] = {"name": "set", "shuffle": False, "queued": 2}
    return Submission(file=file, domain="web", group_size=4, **(given | changed))


async def submit(queue: Queue, submission: Submission) -> Counts:
    submitter = Submitter(submission, OUTAGES)
    await submitter.run(queue, lambda *_: None)
    return submitter.counts


def hardest_first(candidates: Any, rewards: Any) -> list[int]:
    assert rewards == {"web": 0.5}
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


@pytest.mark.parametrize("changed", [{"n": 10}, {"n": 1, "m": 0}])
async def test_changed_row_of_a_submitted_task_is_refused(
    tmp_path: Path, changed: dict[str, int]
) -> None:
    """The number of rows is the same. The line names the row, its task and the remedy."""
    file = write(tmp_path / "t.jsonl", *({"payload": {"n": n}} for n in range(5)))
    queue = Queue(calls=1)
    with pytest.raises(KeyboardInterrupt):
        await submit(queue, make_submission(file))
    queue._calls = 1000
    write(file, *({"payload": changed if n == 1 else {"n": n}} for n in range(5)))
    with pytest.raises(InvalidArgument) as refused:
        await submit(queue, make_submission(file))
    assert str(refused.value).startswith(
        f"{file}: task 2 is not the one that was submitted as set.e0.r1: restore the file"
    )
    assert "--name" in str(refused.value)
    assert len(queue.tasks) == 2


async def test_changed_default_of_a_submitted_task_is_refused(tmp_path: Path) -> None:
    """Options are a part of each task that omits the field."""
    file = write(tmp_path / "t.jsonl", *({"payload": {"n": n}} for n in range(5)))
    queue = Queue()
    await submit(queue, make_submission(file))
    with pytest.raises(InvalidArgument, match=r"task 1 .*--group-size"):
        await submit(queue, Submission(file=file, name="set", domain="web", group_size=2))


async def test_group_without_digest_is_not_compared(tmp_path: Path) -> None:
    """A scheduler of an earlier release returns none: its submissions can be continued."""
    file = write(tmp_path / "t.jsonl", {"payload": {"n": 0}}, {"payload": {"n": 1}})
    queue = Queue(digests=False)
    await submit(queue, make_submission(file))
    write(file, {"payload": {"n": 2}}, {"payload": {"n": 3}})
    assert (await submit(queue, make_submission(file))).accepted == 0


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
        '{"domain": "math", "payload": {"n": 1}}\n\n{"domain": "web", "payload": {"m":3, "n":2}}\n'
    )
    with pytest.raises(InvalidArgument, match=r"t\.jsonl, task 2 .*held_out\.jsonl, task 2"):
        Submitter(make_submission(file, held_out=held_out), OUTAGES)
    write(held_out, {"domain": "web", "payload": {"n": 2}})
    Submitter(make_submission(file, held_out=held_out), OUTAGES)


def test_invalid_curriculum_is_refused() -> None:
    """Before submission."""
    with pytest.raises(ConfigError, match="is not a function"):
        load_curriculum("math:pi")


def test_payload_that_a_domain_of_forge_cannot_use_is_refused(tmp_path: Path) -> None:
    """With line, field and value, before anything is sent; a runner would fail every attempt. A
    domain of the user's own is unknown here, and so is one that a runner replaces."""
    wrong = {"quantity": "mean", "numbers": [1]}
    rows = [{"domain": "mine", "payload": {}}, {"domain": "code", "payload": wrong}]
    file = write(tmp_path / "t.jsonl", *rows, {"domain": "gcd", "payload": {"question": "2?"}})
    with pytest.raises(InvalidArgument) as refused:
        Submitter(make_submission(file), OUTAGES)
    assert str(refused.value).startswith(
        f"{file}, line 2: domain code: payload 'quantity' must be one of sum, largest"
    )
    rows[1]["payload"] = {"quantity": "sum", "numbers": [1]}
    write(file, *rows, {"domain": "gcd", "payload": {"question": "2?"}})
    with pytest.raises(InvalidArgument, match=r"line 3: domain gcd: payload lacks 'answer'"):
        Submitter(make_submission(file), OUTAGES)
    assert Submitter(make_submission(file, check_payloads=False), OUTAGES).rows == 3
