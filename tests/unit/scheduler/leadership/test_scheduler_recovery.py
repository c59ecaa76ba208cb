"""From the pool's records back to the queue."""

from __future__ import annotations

import asyncio
import gc
import time
from typing import Any
from unittest.mock import AsyncMock

from forge.core.queue.admission import QueueSettings
from forge.core.queue.generation_queue import GenerationQueue
from forge.core.queue.groups import Phase
from forge.runtime.coordination import Coordinator, Leadership
from forge.v1 import common_pb2, pool_pb2
from services.scheduler.config import SchedulerConfig
from services.scheduler.leadership.standby import PART_GROUPS, ShardCopies
from services.scheduler.leadership.term import Term
from services.scheduler.state.messages.batches import CommitBatch
from services.scheduler.state.queries.queue_status import status_of
from services.scheduler.state.stored_group import stored_group
from services.scheduler.state.term_state import TermState
from services.scheduler.term_record import TermRecord
from tests.support.pool.records import make_reward
from tests.support.runtime.unused import unused
from tests.support.scheduler.cluster import make_task
from tests.support.scheduler.term import FakeShards

SEALED = common_pb2.TRAJECTORY_STATE_SEALED
ABANDONED = common_pb2.TRAJECTORY_STATE_ABANDONED
OPEN = common_pb2.TRAJECTORY_STATE_OPEN


def scanned(
    name: str,
    index: int,
    *attempts: tuple[str, common_pb2.TrajectoryState.ValueType],
    size: int = 2,
    evaluation: bool = False,
    **record: Any,
) -> pool_pb2.ScanGroupsResponse:
    """A group as a shard tells it; `attempts` are ("rollout:attempt", state)."""
    return pool_pb2.ScanGroupsResponse(
        group=common_pb2.GroupRecord(
            task=make_task(name, size=size, evaluation=evaluation),
            queue_index=index,
            pool_shard="s0",
            **({"state": common_pb2.GROUP_STATE_PENDING} | record),
        ),
        trajectories=[
            common_pb2.TrajectorySummary(
                trajectory_id=f"{name}:{attempt}",
                state=state,
                sealed_unix_s=1.0,
                rewards=[make_reward(value=0.5)],
            )
            for attempt, state in attempts
        ],
    )


def rebuild(*responses: pool_pb2.ScanGroupsResponse) -> TermState:
    queue = GenerationQueue(QueueSettings(concurrency=8), term=1)
    state = TermState(queue, max_pending=100)
    state.earlier.restore(map(stored_group, responses), now_s=0.0)
    return state


async def test_leader_keeps_its_lease_while_it_rebuilds_a_long_queue() -> None:
    """Renewals run between the groups, no garbage collection stops them, and runners have their
    time after the last group."""
    shards = FakeShards()
    shards.scanned = [scanned(f"t{index}", index) for index in range(5000)]
    term = Term(
        SchedulerConfig(),
        unused(Coordinator),
        unused(Leadership),
        shards,
        ShardCopies(shards, most_settled=99),
        awaiting=AsyncMock(),
    )
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += not gc.isenabled()
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    began_s = time.monotonic()
    state = await term._rebuild(frozenset({"s0"}), TermRecord(claims=True))
    counting.cancel()
    assert state.queue.ledger.totals().queued == 5000
    assert turns >= 5000 / PART_GROUPS
    assert gc.isenabled()
    hold_until_s = state.queue.rollouts.hold_until_s
    assert hold_until_s > began_s
    assert status_of(state, now_s=began_s).taking_over
    assert not status_of(state, now_s=hold_until_s).taking_over


def test_group_scanned_twice_is_counted_once() -> None:
    """A shard that joined is scanned again if the first scan was interrupted."""
    once = scanned("a", 0, ("0:0", SEALED), ("1:0", SEALED))
    assert rebuild(once, once).progress.completed("code") == 2


def test_group_on_two_shards_is_counted_once() -> None:
    """The first one counts: a lost shard may return after its tasks were submitted again."""
    twice = (scanned("a", 0), scanned("a", 1), scanned("b", 2))
    assert rebuild(*twice).queue.ledger.totals().queued == 2


def test_tasks_are_found_by_tag_in_queue_order() -> None:
    """Started or not."""
    groups = [scanned(name, index) for index, name in enumerate("abcd")]
    groups[2] = scanned("c", 2, ("0:0", OPEN))
    for group in groups[1:]:
        group.group.task.tag = "x"
    catalog = rebuild(*groups).catalog
    assert catalog.tagged("x") == ("b", "c", "d")
    assert catalog.tagged("") == ("a", "b", "c", "d")


def test_sealed_trajectories_make_a_group_complete() -> None:
    """Rollouts sealed under an earlier leader are not sampled again."""
    state = rebuild(scanned("a", 0, ("0:0", SEALED), ("1:0", ABANDONED), ("1:1", SEALED)))
    group = state.queue.ledger.group("a")
    assert group.phase is Phase.COMPLETE
    assert group.sealed_ids() == ("a:0:0", "a:1:1")
    assert state.progress.completed("code") == 2
    assert state.progress.recent_reward("code") == 0.5


def test_partial_group_waits_for_its_missing_rollouts_alone() -> None:
    """Only unsealed rollouts are leased again, under a new attempt number."""
    state = rebuild(scanned("a", 0, ("1:0", SEALED), ("0:0", OPEN)))
    (grant,) = state.grant(runner_id="r", max_rollouts=9, now_s=0.0)
    assert grant.trajectory_id == "a:0:1000"


def test_trained_and_tombstoned_groups_stay_consumed() -> None:
    """The head passes them, the ledger counts them, and their commits are known."""
    state = rebuild(
        scanned(
            "a",
            0,
            ("0:0", SEALED),
            ("1:0", SEALED),
            state=common_pb2.GROUP_STATE_TRAINED,
            step=3,
            batch_id="batch-0-0",
        ),
        scanned("b", 1, state=common_pb2.GROUP_STATE_TOMBSTONED, reason="gone"),
        scanned("c", 2),
    )
    totals = state.queue.ledger.totals()
    assert (totals.accepted, totals.trained, totals.tombstoned, totals.pending) == (3, 1, 1, 1)
    assert state.queue.window.head == 2
    assert state.queue.ledger.group("b").reason == "gone"
    again = CommitBatch(batch_id="batch-0-0", step=3, task_ids=["a"])
    done = state.prepare_commit(again, now_s=0.0)
    assert done == {}
    assert state.queue.batches.prepare_rewind(2) == ("a",)


def test_open_batch_of_the_earlier_leader_is_pending_again() -> None:
    """Batches are in memory only: uncommitted groups are pending."""
    state = rebuild(
        scanned("a", 0, ("0:0", SEALED), ("1:0", SEALED), state=common_pb2.GROUP_STATE_BATCHED)
    )
    assert state.queue.ledger.group("a").phase is Phase.COMPLETE


def test_complete_evaluation_is_settled_again() -> None:
    """EVALUATED may not be stored: it follows from the seals."""
    state = rebuild(scanned("e", 0, ("0:0", SEALED), size=1, evaluation=True))
    assert state.queue.ledger.group("e").phase is Phase.EVALUATED
    ((shard, final_state),) = state.take_final_states(now_s=0.0)
    assert (shard, final_state.state) == ("s0", common_pb2.GROUP_STATE_EVALUATED)
    assert state.progress.completed("code") == 0


def test_trajectory_beyond_the_group_is_ignored() -> None:
    """A record with a rollout index beyond the group size does no harm."""
    state = rebuild(scanned("a", 0, ("7:0", SEALED)))
    assert state.queue.ledger.group("a").phase is Phase.QUEUED


def test_group_with_a_damaged_record_blocks_no_leader() -> None:
    """The pool has only its queue index; it counts as tombstoned, and the head passes it."""
    lost = common_pb2.GroupRecord(
        task=common_pb2.Task(task_id="lost", purpose=common_pb2.PURPOSE_TRAIN, group_size=1),
        state=common_pb2.GROUP_STATE_TOMBSTONED,
        reason="the checksum does not match",
    )
    state = rebuild(pool_pb2.ScanGroupsResponse(group=lost), scanned("next", 1))
    ledger = state.queue.ledger
    status = ledger.totals()
    assert (status.accepted, status.tombstoned, status.pending) == (2, 1, 1)
    assert ledger.window.head == 1
