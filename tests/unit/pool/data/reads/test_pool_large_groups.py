"""Groups and trajectories with more than a message holds: a leader must be able to read them."""

from __future__ import annotations

from functools import partial

import pytest

from forge.core.errors import InvalidArgument
from forge.core.queue.dispatch.failures import FailureKind, abandon_reason
from forge.core.tasks.validation import MAX_GROUP_SIZE, MAX_PAYLOAD_BYTES
from forge.core.trajectory import parse_trajectory_id
from forge.runtime.rpc.channel import MAX_MESSAGE_BYTES
from forge.v1 import common_pb2
from services.pool.data.reads import reads
from services.pool.data.reads.group_scan import PAGE_BYTES
from services.pool.store import PoolStore
from tests.support.pool.records import make_group, make_reward, make_turn
from tests.support.pool.store import (
    ABANDONED,
    append,
    change,
    pages,
    put_groups,
    seal,
    set_states,
    summary,
)

LONG = "x" * 200


def seal_with_rewards(store: PoolStore, trajectory_id: str, *, rewards: int) -> None:
    """One outcome of 1, and so many rewards for the process."""
    append(store, make_turn(trajectory_id))
    process = [make_reward(f"{number}-{LONG}") for number in range(rewards)]
    seal(store, trajectory_id, rewards=[make_reward("outcome", value=1.0), *process])


def outcomes(summaries: list[common_pb2.TrajectorySummary]) -> list[float]:
    kind = common_pb2.REWARD_KIND_OUTCOME
    return [sum(one.value for one in each.rewards if one.kind == kind) for each in summaries]


def test_scan_of_a_group_with_many_rewards_fits_a_message(store: PoolStore) -> None:
    """It has the outcomes; each trajectory has all of its rewards."""
    put_groups(store, make_group())
    for rollout in range(2):
        for attempt in range(5):
            seal_with_rewards(store, f"task:{rollout}:{attempt}", rewards=2000)
    for scan in (store.scan(), store.scan(brief=True)):
        (scanned,) = pages(scan)
        assert scanned.ByteSize() < MAX_MESSAGE_BYTES
        assert outcomes(list(scanned.trajectories)) == [1.0] * 10
    assert len(summary(store, "task:0:0").rewards) == 2001


def test_summary_with_more_rewards_than_a_message_holds_has_the_outcome(store: PoolStore) -> None:
    """Else no expired lease of its shard could be looked up."""
    seal_with_rewards(store, "task:0:0", rewards=20_000)
    found = summary(store)
    assert found.ByteSize() < MAX_MESSAGE_BYTES
    assert outcomes([found]) == [1.0]


def test_reason_of_an_agent_is_cut(store: PoolStore) -> None:
    """Agents abandon their own sessions, with any reason; a scan has all of a group's."""
    put_groups(store, make_group())
    for attempt in range(2):
        seal(
            store, f"task:0:{attempt}", turns=0, state=ABANDONED, reason="agent: " + "x" * 4_000_000
        )
    (scanned,) = pages(store.scan(brief=True))
    assert scanned.ByteSize() < MAX_MESSAGE_BYTES
    assert {one.reason[:8] for one in scanned.trajectories} == {"agent: x"}


def test_reason_of_a_tombstone_is_cut(store: PoolStore) -> None:
    """It may be the error of a rollout, as its runner reports it."""
    put_groups(store, make_group())
    set_states(store, change("task", common_pb2.GROUP_STATE_TOMBSTONED, reason="x" * 4_500_000))
    (scanned,) = pages(store.scan(brief=True))
    assert scanned.group.reason == "x" * 1000


def test_scan_leaves_lost_attempts_out_where_they_are_too_many(
    store: PoolStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After days of an outage; failures of the task and the newest attempt stay."""
    monkeypatch.setattr(reads, "MOST_GROUP_BYTES", 240)
    put_groups(store, make_group())
    lost = abandon_reason(FailureKind.INFRASTRUCTURE, "no router")
    for attempt, reason in enumerate(("boom", lost, lost, lost)):
        seal(store, f"task:0:{attempt}", turns=0, state=ABANDONED, reason=reason)
    seal(store, "task:1:0", turns=0, state=ABANDONED, reason=lost)
    (scanned,) = pages(store.scan(brief=True))
    names = [parse_trajectory_id(one.trajectory_id) for one in scanned.trajectories]
    assert [(name.rollout_index, name.attempt) for name in names] == [(0, 0), (0, 3), (1, 0)]


def test_largest_group_fits_a_message_whatever_its_attempts(store: PoolStore) -> None:
    """Each rollout failed before it was sealed, all names have their full length, and the payload,
    too: a leader could not begin."""
    task_id, longest = "t" * 200, 2**32 - 1
    payload = '{"p": "' + "x" * (MAX_PAYLOAD_BYTES - 9) + '"}'
    put_groups(store, make_group(task_id, payload_json=payload))
    kind = common_pb2.REWARD_KIND_OUTCOME
    outcome = common_pb2.RewardEvent(event_id="e" * 256, name="n" * 256, kind=kind, value=0.5)
    scanned = store.read(partial(reads.scanned_group, task_id=task_id, brief=True))
    for rollout in range(MAX_GROUP_SIZE):
        for attempt in (longest - 1, longest):
            scanned.trajectories.add(
                trajectory_id=f"{task_id}:{longest - MAX_GROUP_SIZE + rollout}:{attempt}",
                task_id=task_id,
                state=common_pb2.TRAJECTORY_STATE_SEALED if attempt == longest else ABANDONED,
                reason="" if attempt == longest else "x" * 1000,
                rewards=[outcome] if attempt == longest else [],
                domain="d" * 64,
                sealed_unix_s=1e9,
            )
    reads.shorten_group(scanned)
    # A page of other groups may come before it.
    assert scanned.ByteSize() + PAGE_BYTES < MAX_MESSAGE_BYTES
    assert outcomes(list(scanned.trajectories)) == [0.5] * MAX_GROUP_SIZE


def test_long_name_of_a_reward_is_refused(store: PoolStore) -> None:
    """Each read of a trajectory has the names of its rewards."""
    reward = make_reward()
    reward.name = "x" * 257
    with pytest.raises(InvalidArgument, match="name of 257 bytes"):
        seal(store, rewards=[reward])
