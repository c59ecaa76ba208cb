"""Groups on a pool shard that retires, in the memory of a term."""

from __future__ import annotations

from forge.core.queue.admission import QueueSettings
from forge.core.queue.generation_queue import GenerationQueue
from forge.core.queue.groups import Phase
from forge.v1 import common_pb2
from services.scheduler.state.messages.removals import FindMovable
from services.scheduler.state.messages.rollouts import AttemptReport
from services.scheduler.state.queries.removed_shards import movable, on_shard
from services.scheduler.state.stored_group import new_group
from services.scheduler.state.term_state import TermState
from tests.support.scheduler.cluster import make_task

LEASE_S = 10.0


def make_state() -> TermState:
    """Groups a and b on s1, c on s0; a is leased."""
    settings = QueueSettings(rollout_lease_s=LEASE_S, retry_backoff_s=1.0)
    state = TermState(GenerationQueue(settings), max_pending=9)
    for index, (task_id, shard) in enumerate((("a", "s1"), ("b", "s1"), ("c", "s0"))):
        record = common_pb2.GroupRecord(
            task=make_task(task_id), queue_index=index, pool_shard=shard
        )
        state.add_group(record, new_group(record), now_s=0.0)
    (grant,) = state.grant(runner_id="r", max_rollouts=1, now_s=0.0)
    assert grant.task.task_id == "a"
    return state


def retire(state: TermState) -> None:
    state.set_away(frozenset(), unread=frozenset(), now_s=0.0, retiring=frozenset({"s1"}))


def find(state: TermState, *, now_s: float = 0.0) -> tuple[list[str], int]:
    found = movable(state, FindMovable(shard="s1", most=9), now_s=now_s)
    return list(found.task_ids), found.busy


def test_nothing_is_leased_on_a_retiring_shard() -> None:
    """Its groups wait for their move; those of other shards start."""
    state = make_state()
    assert find(state) == ([], 2), "not before its leases have stopped"
    retire(state)
    grants = state.grant(runner_id="r", max_rollouts=9, now_s=0.0)
    assert [grant.task.task_id for grant in grants] == ["c"]
    assert find(state) == (["b"], 1)
    state.queue.rollouts.hold(until_s=5.0)
    assert find(state, now_s=4.0) == ([], 2), "runners of an earlier term may renew"


def test_an_expired_lease_on_a_retiring_shard_is_looked_up() -> None:
    """A silent runner must not hold its group there forever: the shard answers."""
    state = make_state()
    retire(state)
    assert state.expire(LEASE_S) == {"s1": ["a:0:0"]}
    state.settle(AttemptReport(trajectory_id="a:0:0", silent=True), now_s=LEASE_S)
    assert find(state, now_s=LEASE_S) == (["a", "b"], 0)


def test_moved_groups_are_leased_from_their_new_shard() -> None:
    """Its name is in the grant, and the retired shard has none."""
    state = make_state()
    retire(state)
    state.queue.ledger.relocate({"b": None}, source="s1", target="s0")
    grants = state.grant(runner_id="r", max_rollouts=9, now_s=0.0)
    assert {grant.task.task_id: grant.pool_shard for grant in grants} == {"b": "s0", "c": "s0"}


def test_the_records_of_a_lost_shard_have_payloads_and_states() -> None:
    """Pending groups keep their payload, tombstoned ones their reason."""
    state = make_state()
    state.queue.rollouts.drop(["b"], reason="gone")
    state.take_final_states(now_s=0.0)
    found = on_shard(state, "s1")
    records = {record.task.task_id: record for record in found.records}
    assert records["a"].task.payload_json and records["a"].task_digest
    assert records["a"].state == common_pb2.GROUP_STATE_PENDING
    assert (records["b"].state, records["b"].reason) == (
        common_pb2.GROUP_STATE_TOMBSTONED,
        "gone",
    )
    assert not found.forgotten
    state.queue.ledger.forget(most=0)
    assert on_shard(state, "s1").forgotten == {(False, Phase.TOMBSTONED): 1}
