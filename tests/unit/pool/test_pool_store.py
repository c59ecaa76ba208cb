"""The rules of the store: idempotence, seals, fences, order."""

from __future__ import annotations

from typing import Any

import pytest

from forge.core.errors import (
    ConfigError,
    Conflict,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    StaleFence,
)
from forge.core.trajectory import parse_trajectory_id
from forge.v1 import common_pb2
from services.pool import validation
from services.pool.data.commands import AppendTurns
from services.pool.maintenance.backup import backup
from services.pool.storage.keys import trajectory_key
from services.pool.storage.tables import Table
from tests.support.pool.records import make_group, make_reward, make_turn
from tests.support.pool.store import (
    ABANDONED,
    SEALED,
    append,
    change,
    commit,
    fetch,
    groups_page,
    put_groups,
    queued,
    reward,
    seal,
    set_states,
    summary,
)


def test_trajectory_is_read_back(store):
    """Turns, rewards and header are equal, and turns are in order however they arrived."""
    turns = [
        make_turn(index=0),
        make_turn(index=1, prefix=5),
        make_turn(index=2, parent=0, prefix=2),
    ]
    append(store, turns[2], turns[0])
    append(store, turns[1])
    rewards = [make_reward("b"), make_reward("a", 0.5, turn_index=1)]
    seal(store, turns=3, rewards=rewards, closing_agent_s=2.5)
    assert fetch(store) == common_pb2.Trajectory(
        trajectory_id="task:0:0",
        task_id="task",
        domain="code",
        state=SEALED,
        turns=turns,
        rewards=[make_reward("a", 0.5, turn_index=1), make_reward("b")],
        sealed_unix_s=100.0,
        closing_agent_s=2.5,
    )


def test_seal_without_the_agents_end_leaves_it_unknown(store):
    """Not 0, which is a time; a repeated seal with another end changes nothing."""
    append(store, make_turn())
    seal(store)
    seal(store, closing_agent_s=1.0)
    assert not fetch(store).HasField("closing_agent_s")


def test_first_turn_opens_its_trajectory(store):
    """A trajectory is open from its first turn, and has a summary."""
    append(store, make_turn(version=7))
    assert summary(store) == common_pb2.TrajectorySummary(
        trajectory_id="task:0:0",
        task_id="task",
        state=common_pb2.TRAJECTORY_STATE_OPEN,
        turns=1,
        prompt_tokens=3,
        sampled_tokens=2,
        min_weight_version=7,
        max_weight_version=7,
    )


def test_repeated_turn_changes_nothing(store):
    """It is acknowledged, even after the seal, and stored once."""
    append(store, make_turn())
    append(store, make_turn(), make_turn())
    seal(store)
    append(store, make_turn())
    assert len(fetch(store).turns) == 1


def test_turn_with_another_field_order_is_the_same_turn(store):
    """Content is compared, not bytes: the sender's library may order fields otherwise."""
    whole = make_turn()
    first = common_pb2.Turn(trajectory_id=whole.trajectory_id)
    rest = make_turn()
    rest.ClearField("trajectory_id")
    reordered = rest.SerializeToString() + first.SerializeToString()
    append(store, whole)
    (answer,) = store.commit([AppendTurns(turns=(validation.new_turn(reordered),))])
    assert answer == (None,)


def test_other_turn_under_the_same_index_is_refused(store):
    """The stored turn stays; the message names it."""
    append(store, make_turn(sampled=(4, 5)))
    with pytest.raises(Conflict, match=r"turn 0 of task:0:0 .* other content"):
        append(store, make_turn(sampled=(4, 6)))
    assert fetch(store).turns == [make_turn(sampled=(4, 5))]


def test_refused_turn_does_not_block_its_neighbours(store):
    """In one commit every turn has its own outcome."""
    append(store, make_turn(index=0))
    new = [make_turn(index=0, sampled=(9,)), make_turn(index=1, prefix=5)]
    command = AppendTurns(turns=tuple(validation.new_turn(t.SerializeToString()) for t in new))
    refused, accepted = commit(store, command)
    assert isinstance(refused, Conflict)
    assert accepted is None
    assert len(fetch(store).turns) == 2


@pytest.mark.parametrize("state", [SEALED, ABANDONED])
def test_closed_trajectory_accepts_no_turn(store, state):
    """After the seal a new turn is FAILED_PRECONDITION and is not stored."""
    append(store, make_turn(index=0))
    seal(store, state=state)
    with pytest.raises(FailedPrecondition, match="takes no turn 1"):
        append(store, make_turn(index=1))
    assert len(fetch(store).turns) == 1


def test_seal_counts_its_turns(store):
    """The summary adds up prompt and sampled tokens and the range of weight versions."""
    append(store, make_turn(index=0, version=3), make_turn(index=1, prefix=5, version=5))
    sealed = seal(store, turns=2, rewards=[make_reward()])
    assert (sealed.turns, sealed.prompt_tokens, sealed.sampled_tokens) == (2, 6, 4)
    assert (sealed.min_weight_version, sealed.max_weight_version) == (3, 5)
    assert sealed.rewards == [make_reward()]
    assert sealed == summary(store)


def test_repeated_seal_returns_the_same_summary(store):
    """A retry whose first answer was lost gets that answer."""
    append(store, make_turn())
    first = seal(store, rewards=[make_reward()])
    assert seal(store, rewards=[make_reward()]) == first


def test_seal_names_missing_turns(store):
    """An early seal is FAILED_PRECONDITION, leaves the trajectory open, and names the turns to
    resend."""
    append(store, make_turn(index=1))
    with pytest.raises(FailedPrecondition, match="lacks 2 of its 3 turns: 0, 2"):
        seal(store, turns=3)
    assert summary(store).state == common_pb2.TRAJECTORY_STATE_OPEN


def test_seal_with_fewer_turns_than_stored_is_refused(store):
    """A writer that does not know of stored turns must not close the trajectory over them."""
    append(store, make_turn(index=0), make_turn(index=1))
    with pytest.raises(FailedPrecondition, match="2 turns stored, more than the 1"):
        seal(store, turns=1)


def test_seal_refuses_turns_that_form_no_tree(store):
    """A prefix longer than the parent's sequence has no tokens, so it cannot be sealed."""
    append(store, make_turn(index=0), make_turn(index=1, prefix=6))
    with pytest.raises(InvalidArgument, match="prefix_tokens 6"):
        seal(store, turns=2)


def test_trajectory_can_be_abandoned_at_any_time(store):
    """Incomplete, or before any turn; the reason is kept."""
    append(store, make_turn(index=1))
    assert seal(store, turns=5, state=ABANDONED, reason="runner died").turns == 1
    assert fetch(store).reason == "runner died"
    assert seal(store, "task:1:0", turns=0, state=ABANDONED).state == ABANDONED


def test_rollout_without_turns_can_be_sealed(store, tmp_path):
    """Unknown until then, it is closed with its outcome, and repeated only in the same form; it
    accepts and credits no turn, and a check finds no damage."""
    sealed = seal(store, turns=0, rewards=[make_reward()])
    assert (sealed.state, sealed.turns, sealed.sampled_tokens) == (SEALED, 0, 0)
    assert (sealed.min_weight_version, sealed.max_weight_version) == (-1, -1)
    assert sealed.rewards == [make_reward()]
    assert seal(store, turns=0) == sealed
    with pytest.raises(FailedPrecondition, match="cannot become sealed with 1"):
        seal(store, turns=1)
    with pytest.raises(FailedPrecondition, match="takes no turn 0"):
        append(store, make_turn())
    with pytest.raises(InvalidArgument, match="credits turn_index 0"):
        reward(store, make_reward("late", turn_index=0))
    assert fetch(store).turns == []
    store.close()
    assert list(backup.check(tmp_path / "shard", lambda done, total: None)) == []


def test_seal_is_final(store):
    """A sealed trajectory cannot be abandoned, nor sealed with another count."""
    append(store, make_turn())
    seal(store)
    with pytest.raises(FailedPrecondition, match="is sealed with 1 turns"):
        seal(store, state=ABANDONED)
    with pytest.raises(FailedPrecondition, match="cannot become sealed with 2"):
        seal(store, turns=2)


def test_rewards_are_stored_once_by_event_id(store):
    """The first value under an event id stays, before and after the seal."""
    reward(store, make_reward("early", 0.25))
    append(store, make_turn())
    seal(store, rewards=[make_reward("early", 0.75), make_reward("at-seal")])
    reward(store, make_reward("late"), make_reward("at-seal", 0.0))
    assert {r.event_id: r.value for r in summary(store).rewards} == {
        "early": 0.25,
        "at-seal": 1.0,
        "late": 1.0,
    }


def test_reward_for_a_missing_turn_is_refused(store):
    """At the seal and after it, a credited turn must be one of the trajectory's."""
    append(store, make_turn())
    with pytest.raises(InvalidArgument, match="turn_index 1"):
        seal(store, rewards=[make_reward(turn_index=1)])
    seal(store)
    with pytest.raises(InvalidArgument, match="turn_index 1"):
        reward(store, make_reward(turn_index=1))


def test_seal_refuses_a_reward_for_a_missing_turn(store):
    """An earlier reward is compared with the turns, as a later one is; the trajectory can still be
    abandoned."""
    append(store, make_turn(index=0))
    reward(store, make_reward("early", turn_index=1))
    with pytest.raises(InvalidArgument, match="reward early credits turn_index 1, but task:0:0"):
        seal(store, turns=1)
    assert summary(store).state == common_pb2.TRAJECTORY_STATE_OPEN
    append(store, make_turn(index=1, prefix=5))
    assert seal(store, turns=2).turns == 2


def test_groups_are_listed_in_queue_order_with_their_trajectories(store):
    """Order is by purpose and queue index; each group carries its own trajectories only."""
    append(
        store, make_turn("t10:1:0"), make_turn("t1:0:0"), make_turn("t10:0:2"), make_turn("t:0:0")
    )
    evaluation = make_group("t", 0, purpose=common_pb2.PURPOSE_EVAL)
    put_groups(store, make_group("t10", 256), make_group("t1", 2), evaluation)
    listed = groups_page(store).groups
    assert [response.group.task.task_id for response in listed] == ["t1", "t10", "t"]
    assert [t.trajectory_id for t in listed[1].trajectories] == ["t10:0:2", "t10:1:0"]
    assert listed[0].group.state == common_pb2.GROUP_STATE_PENDING
    assert listed[0].group.pool_shard == "s0"


def test_pages_cover_every_group_once(store):
    """Paging by count or by bytes visits every group once, in order."""
    put_groups(store, *(make_group(f"t{index}", index) for index in range(10)))
    every_limit: list[dict[str, Any]] = [{"limit": 3}, {"limit_bytes": 1}]
    for limits in every_limit:
        found: list[Any] = []
        after = b""
        while not found or after:
            page = groups_page(store, after=after, **limits)
            found += [response.group.task.task_id for response in page.groups]
            after = page.last_key
        assert found == [f"t{index}" for index in range(10)]


def test_group_is_stored_once(store):
    """A repeated put leaves the record and its state as they are."""
    put_groups(store, make_group(queue_index=1))
    set_states(store, change("task", common_pb2.GROUP_STATE_TRAINED, batch_id="b", step=4))
    put_groups(store, make_group(queue_index=9))
    (only,) = groups_page(store).groups
    assert only.group.queue_index == 1
    assert (only.group.state, only.group.step) == (common_pb2.GROUP_STATE_TRAINED, 4)


def test_state_replaces_the_earlier_state(store):
    """Back to pending, as a rewind does, it has no batch and no step."""
    put_groups(store, make_group())
    set_states(store, change("task", common_pb2.GROUP_STATE_TRAINED, batch_id="b", step=4))
    set_states(store, change("task", common_pb2.GROUP_STATE_PENDING))
    (only,) = groups_page(store).groups
    assert only.group == make_group_stored(common_pb2.GROUP_STATE_PENDING)


def make_group_stored(state) -> common_pb2.GroupRecord:
    group = make_group()
    group.state = state
    group.pool_shard = "s0"
    return group


def test_states_change_all_or_none(store):
    """One unknown group refuses the whole request by name."""
    put_groups(store, make_group("known"))
    with pytest.raises(NotFound, match="group unknown"):
        set_states(
            store,
            change("known", common_pb2.GROUP_STATE_BATCHED),
            change("unknown", common_pb2.GROUP_STATE_BATCHED),
        )
    (only,) = groups_page(store).groups
    assert only.group.state == common_pb2.GROUP_STATE_PENDING


def test_deposed_leader_is_refused_also_after_a_restart(store, open_store):
    """The newest fence is durable: an older one writes no groups and no states."""
    put_groups(store, make_group("a"), fence=7)
    store = open_store()
    with pytest.raises(StaleFence, match="fence 6 is stale"):
        put_groups(store, make_group("b"), fence=6)
    with pytest.raises(StaleFence):
        set_states(store, change("a", common_pb2.GROUP_STATE_TOMBSTONED), fence=6)
    put_groups(store, make_group("c", 1), fence=7)
    assert queued(store) == ["a", "c"]


def test_empty_put_raises_the_fence(store):
    """A new leader excludes its predecessor before it scans."""
    put_groups(store, fence=5)
    with pytest.raises(StaleFence):
        put_groups(store, make_group(), fence=4)


def test_unknown_trajectory_is_not_found(store):
    """A fetch names it; a listing of summaries omits it."""
    with pytest.raises(NotFound, match="task:0:0"):
        fetch(store)
    assert store.summaries([parse_trajectory_id("task:0:0")]) == []


def test_shard_keeps_its_name(open_store):
    """The name is created once, stored with the data, and no setting changes it."""
    name = open_store().shard
    assert open_store().shard == name
    assert open_store(shard=name).shard == name
    with pytest.raises(ConfigError, match=rf"holds shard '{name}'"):
        open_store(shard="other")


def test_statistics_count_stored_records(store):
    """Groups, trajectories and turns, and the size of the shard."""
    put_groups(store, make_group())
    append(store, make_turn(), make_turn(index=1), make_turn("task:1:0"))
    stats = store.stats()
    assert (stats.pool_shard, stats.groups, stats.trajectories, stats.turns) == ("s0", 1, 2, 3)
    assert 0 < stats.used_bytes <= stats.map_bytes
    assert stats.disk_free_bytes > 0


def test_scan_passes_over_unreadable_trajectories(store):
    """A damaged trajectory blocks no new leader: it is left out."""
    put_groups(store, make_group("a"), make_group("b", queue_index=1))
    for trajectory_id in ("a:0:0", "a:1:0", "b:0:0"):
        append(store, make_turn(trajectory_id))
    key = trajectory_key(parse_trajectory_id("a:0:0"))
    store.write(lambda records: records.put_checksummed(Table.TRAJECTORIES, key, b"no checksum"))
    found = [[t.trajectory_id for t in group.trajectories] for group in groups_page(store).groups]
    assert found == [["a:1:0"], ["b:0:0"]]
