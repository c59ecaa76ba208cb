"""A file of tasks on its way into a real queue."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forge.cli.queue.outages import Outages
from forge.cli.queue.submission import Submission
from forge.cli.queue.submitting import Submitter
from forge.client.operator import Operator
from forge.core.errors import InvalidArgument
from tests.support.scheduler.cluster import START_S, SchedulerCluster


async def test_submission_continues_after_the_leader_was_killed(
    forge: SchedulerCluster, tmp_path: Path
) -> None:
    """The next start of the command continues from the groups that the next leader finds in the
    pool, and refuses a file whose submitted rows changed."""
    file = tmp_path / "sums.jsonl"
    file.write_text("".join(json.dumps({"payload": {"n": n}}) + "\n" for n in range(4)))
    leader = forge.start_scheduler()
    first = await forge.leader()
    submission = Submission(
        file=file,
        name="sums",
        seed=3,
        queued=3,
        domain="math",
        scaffold="none",
        group_size=1,
    )
    operator = Operator(forge.coordinator, forge.channels)
    outages = Outages(print, longest_s=START_S)
    submitted = Submitter(submission, outages)
    cursor = await submitted._resume(operator)
    places = cursor.waiting(3)
    await operator.submit(map(submitted._named, places))
    await forge.kill(leader)
    forge.start_scheduler()
    await forge.leader(other_than=first.instance_id)
    await forge.complete(3)
    submitted = Submitter(submission, outages)
    await submitted.run(operator, lambda *_: None)
    assert submitted.counts.accepted == 1
    ids = [group.group.task.task_id for group in await forge.groups("sums")]
    assert sorted(ids) == [f"sums.e0.r{row}" for row in range(4)]
    file.write_text("".join(json.dumps({"payload": {"n": n + 1}}) + "\n" for n in range(4)))
    with pytest.raises(InvalidArgument, match=r"task \d is not the one that was submitted"):
        await Submitter(submission, outages).run(operator, lambda *_: None)
