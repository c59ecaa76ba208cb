"""Drops of groups while the queue changes: the pool and the queue agree afterwards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from forge.v1 import common_pb2
from services.scheduler.shards.pool_shards import GroupStateChange
from services.scheduler.state.messages.batches import CommitBatch, TakeBatch
from services.scheduler.state.messages.groups import DropGroups
from services.scheduler.state.messages.rollouts import AttemptReport, SettleRollouts
from tests.support.runtime.waiting import until
from tests.support.scheduler.cluster import make_task
from tests.support.scheduler.term import ASK_S, FakeShards, TermActors
from tests.support.scheduler.term_calls import lease, status, submit


async def test_group_that_a_batch_takes_during_its_drop_is_not_dropped(
    term: TermActors, shards: FakeShards, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither in the count nor in the pool: a later leader would tombstone what was trained. The
    same holds for an evaluation that ends then."""
    for name in ("a", "b"):
        await submit(term, make_task(name))
    await submit(term, make_task("e", evaluation=True))
    leased = {trajectory_id[0]: trajectory_id for trajectory_id in await lease(term)}
    for trajectory_id in leased.values():
        shards.seal(trajectory_id)

    async def finish(name: str) -> None:
        summary = shards.stored[leased[name]]
        report = AttemptReport(trajectory_id=leased[name], summary=summary)
        await term.queue.ask(SettleRollouts(reports=[report]), timeout_s=ASK_S)

    await finish("a")
    set_states, taken = shards.set_states, list[Any]()

    async def during_the_write(
        changes: Mapping[str, Sequence[GroupStateChange]], **options: Any
    ) -> list[str]:
        monkeypatch.setattr(shards, "set_states", set_states)
        ask = TakeBatch(trainer_id="t", max_groups=1)
        taken.append(await (await term.queue.ask(ask, timeout_s=ASK_S)))
        await finish("e")
        await until(lambda: "e" in shards.states())
        return await set_states(changes, **options)

    monkeypatch.setattr(shards, "set_states", during_the_write)
    drop = DropGroups(task_ids=("a", "b", "e"), reason="wrong data")
    assert await term.commits.ask(drop, timeout_s=ASK_S) == 1
    assert shards.states() == {
        "a": common_pb2.GROUP_STATE_PENDING,
        "b": common_pb2.GROUP_STATE_TOMBSTONED,
        "e": common_pb2.GROUP_STATE_EVALUATED,
    }
    commit = CommitBatch(batch_id=taken[0].batch_id, step=1, task_ids=["a"])
    await term.commits.ask(commit, timeout_s=ASK_S)
    found = await status(term)
    assert (found.trained, found.tombstoned) == (1, 1)
