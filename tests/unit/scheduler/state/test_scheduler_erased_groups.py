"""Erased groups in one leader's term: which ones leave the queue, and when."""

from __future__ import annotations

import pytest

from services.scheduler.state import erased_groups
from services.scheduler.state.erased_groups import NoteErased
from services.scheduler.state.messages.batches import CommitBatch, TakeBatch
from services.scheduler.state.messages.groups import Submit, ViewGroups
from services.scheduler.state.messages.rollouts import AttemptReport, LeaseRollouts, SettleRollouts
from tests.support.scheduler.cluster import make_task
from tests.support.scheduler.term import ASK_S, TermActors


async def submit(term: TermActors, *names: str) -> None:
    submitted = Submit(tasks={name: make_task(name) for name in names})
    await term.submissions.ask(submitted, timeout_s=ASK_S)


async def note(term: TermActors, *names: str) -> int:
    dropped: int = await term.queue.ask(NoteErased(task_ids=names), timeout_s=ASK_S)
    return dropped


async def phases(term: TermActors, *names: str) -> list[str]:
    views = await term.queue.ask(ViewGroups(task_ids=names), timeout_s=ASK_S)
    return [view.phase for view in views]


async def test_group_erased_before_it_is_added_leaves_at_once(term: TermActors) -> None:
    """Its shard has stored it, and the erasure arrives before the submission does."""
    assert await note(term, "a", "unknown") == 0
    await submit(term, "a", "b")
    assert await phases(term, "a", "b") == ["tombstoned", "queued"]


async def test_early_erasures_are_bounded(
    term: TermActors, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest are forgotten first."""
    monkeypatch.setattr(erased_groups, "MAX_EARLY", 2)
    await note(term, "a", "b", "c")
    await submit(term, "a", "b", "c")
    assert await phases(term, "a", "b", "c") == ["queued", "tombstoned", "tombstoned"]


async def test_erased_group_in_a_batch_stays_there(term: TermActors) -> None:
    """The trainer releases it when it finds it erased; settled groups do not change."""
    await submit(term, "a")
    ask = LeaseRollouts(runner_id="r", max_rollouts=1)
    (grant,) = await (await term.queue.ask(ask, timeout_s=ASK_S))
    term.shards.seal(grant.trajectory_id)
    summary = term.shards.stored[grant.trajectory_id]
    report = AttemptReport(trajectory_id=grant.trajectory_id, summary=summary)
    await term.queue.ask(SettleRollouts(reports=(report,)), timeout_s=ASK_S)
    take = TakeBatch(trainer_id="t", max_groups=1, held={})
    batch = await (await term.queue.ask(take, timeout_s=ASK_S))
    assert await note(term, "a") == 0
    assert await phases(term, "a") == ["batched"]
    commit = CommitBatch(batch_id=batch.batch_id, step=1, task_ids=("a",))
    await term.commits.ask(commit, timeout_s=ASK_S)
    assert await note(term, "a") == 0
    assert await phases(term, "a") == ["trained"]
