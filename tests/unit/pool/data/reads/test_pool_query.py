"""Filters, pages and counts over a store."""

from __future__ import annotations

import base64
import math
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge.core.errors import DataLoss, InvalidArgument
from forge.core.trajectory import parse_trajectory_id
from forge.v1 import common_pb2, pool_pb2
from services.pool.data.reads import query
from services.pool.data.reads import stats as stats_module
from services.pool.data.reads.stats import Tally
from services.pool.storage.keys import trajectory_key
from services.pool.storage.tables import Table
from services.pool.store import PoolStore
from tests.support.pool.records import make_group, make_reward, make_turn
from tests.support.pool.store import (
    ABANDONED,
    SEALED,
    append,
    change,
    put_groups,
    reward,
    seal,
    set_states,
)

OPEN = common_pb2.TRAJECTORY_STATE_OPEN


def page(store: PoolStore, *, token: str = "", size: int = 0, name_damaged: bool = False, **wanted):
    request = pool_pb2.QueryTrajectoriesRequest(
        filter=pool_pb2.TrajectoryFilter(**wanted), page_size=size, page_token=token
    )
    look = partial(query.query, request=request, shard=store.shard, name_damaged=name_damaged)
    return store.read(look)


def found(store: PoolStore, *, size: int = 0, **wanted) -> list[str]:
    """Ids over all pages."""
    ids, token = [], ""
    while True:
        answer = page(store, token=token, size=size, **wanted)
        ids += [summary.trajectory_id for summary in answer.trajectories]
        token = answer.next_page_token
        if not token:
            return ids


@pytest.fixture
def filled(store: PoolStore) -> PoolStore:
    """a: sealed, code, versions 3 to 5, outcome 1, closed at 10; b: sealed, math, 7, 0.25, at 20;
    c: abandoned, code, 5, at 30; d: open, 9; e: sealed, code, no tokens, at 40."""
    append(store, make_turn("a:0:0", version=3), make_turn("a:0:0", 1, version=5))
    append(store, make_turn("b:0:0", version=7), make_turn("c:0:0", version=5))
    append(store, make_turn("d:0:0", version=9), make_turn("e:0:0", sampled=[]))
    seal(store, "a:0:0", turns=2, rewards=[make_reward()], now_unix_s=10)
    seal(store, "b:0:0", domain="math", rewards=[make_reward(value=0.25)], now_unix_s=20)
    seal(store, "c:0:0", state=ABANDONED, now_unix_s=30)
    seal(store, "e:0:0", now_unix_s=40)
    return store


def test_tasks_are_read_alone_and_page_by_page(store):
    """In the order of keys, although another task's id begins with theirs; a page ends at a
    trajectory and the next one continues behind it."""
    for task in ("a", "a.b", "a-b", "aa", "b"):
        for rollout in range(3):
            seal(store, f"{task}:{rollout}:0", turns=0)
    tasks = ["aa", "a", "a-b", "a"]
    ids = [f"{task}:{rollout}:0" for task in ("a-b", "a", "aa") for rollout in range(3)]
    assert found(store, size=2, task_ids=tasks) == found(store, task_ids=tasks) == ids


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ({}, "abcde"),
        ({"domain": "code"}, "ace"),
        ({"state": SEALED}, "abe"),
        ({"state": OPEN}, "d"),
        ({"domain": "code", "state": ABANDONED}, "c"),
        ({"min_reward": 0.25}, "ab"),
        ({"max_reward": 0.5}, "b"),
        ({"min_reward": 0.3, "max_reward": 0.9}, ""),
        ({"min_reward": 0.0, "reward_name": "exact_answer"}, "ab"),
        ({"min_reward": 0.0, "reward_name": "other"}, ""),
        ({"min_weight_version": 5}, "abcd"),
        ({"max_weight_version": 4}, "a"),
        ({"min_weight_version": 4, "max_weight_version": 4}, "a"),
        ({"min_weight_version": 8, "state": OPEN}, "d"),
        ({"closed_from_unix_s": 20}, "bce"),
        ({"closed_before_unix_s": 30}, "ab"),
        ({"closed_from_unix_s": 10, "closed_before_unix_s": 40, "domain": "code"}, "ac"),
        ({"closed_from_unix_s": 41}, ""),
        ({"task_ids": ["e", "a", "nowhere"]}, "ae"),
        ({"task_ids": ["a", "b", "c"], "closed_from_unix_s": 20}, "bc"),
    ],
)
def test_filter_returns_all_matching_trajectories(filled, wanted, expected):
    """Each bound alone and combined; bounds of rewards and versions are included, the later of two
    times is not. One page or many give the same result."""
    assert found(filled, **wanted) == [f"{task}:0:0" for task in expected]
    assert found(filled, size=1, **wanted) == [f"{task}:0:0" for task in expected]


def test_page_reads_a_bounded_number_of_records(filled, monkeypatch):
    """A filter with few matches costs no more per page than others: its pages may be empty, and
    have a token for the next."""
    monkeypatch.setattr(query, "PAGE_COST", 2)
    first = page(filled, domain="math")
    assert [summary.trajectory_id for summary in first.trajectories] == ["b:0:0"]
    second = page(filled, token=first.next_page_token, domain="math")
    assert not second.trajectories and second.next_page_token
    assert found(filled, domain="math") == ["b:0:0"]


@pytest.mark.parametrize("wanted", [{}, {"state": OPEN}, {"min_weight_version": 1}])
def test_page_counts_turns_of_open_trajectories_as_read(store, monkeypatch, wanted):
    """Under every filter: the summary counts them."""
    monkeypatch.setattr(query, "PAGE_COST", 20)
    for number in range(6):
        append(store, *(make_turn(f"t{number}:0:0", index) for index in range(9)))
    first = page(store, **wanted)
    assert [summary.turns for summary in first.trajectories] == [9, 9]
    assert len(found(store, **wanted)) == 6


@pytest.mark.parametrize("wanted", [{}, {"closed_from_unix_s": 5.0}])
def test_pages_are_stable_under_writes(store, wanted):
    """A trajectory that exists from the first page to the last is returned once, for any closed,
    opened and rewarded ones between two pages."""
    stayed = [f"m{number:03}:0:0" for number in range(40)]
    for trajectory_id in stayed:
        append(store, make_turn(trajectory_id))
        seal(store, trajectory_id, now_unix_s=10)
    ids, token, number = [], "", 0
    while number == 0 or token:
        answer = page(store, token=token, size=3, **wanted)
        token = answer.next_page_token
        ids += [summary.trajectory_id for summary in answer.trajectories]
        for task in (f"a{number:03}", f"m{number:03}x"):
            append(store, make_turn(f"{task}:0:0"))
            # Some are closed by a clock that has gone back.
            seal(store, f"{task}:0:0", now_unix_s=11 if number % 2 else 6)
            reward(store, make_reward("late"), trajectory_id=f"m{number % 40:03}:0:0")
        number += 1
        if number > 200:
            break
    assert [trajectory_id for trajectory_id in ids if trajectory_id in stayed] == stayed
    assert len(ids) == len(set(ids))


@settings(deadline=None, max_examples=20)
@given(
    times=st.lists(st.integers(min_value=1, max_value=12), max_size=12),
    since=st.integers(min_value=0, max_value=13),
)
def test_clock_jumps_hide_no_closed_trajectory(tmp_path_factory, times, since):
    """All trajectories closed at or after a moment are found, in the order of closing."""
    store = PoolStore(tmp_path_factory.mktemp("jump") / "shard", map_bytes=1 << 20)
    for number, unix_s in enumerate(times):
        append(store, make_turn(f"t{number}:0:0"))
        seal(store, f"t{number}:0:0", now_unix_s=unix_s)
    expected = [f"t{number}:0:0" for number, unix_s in enumerate(times) if unix_s >= since]
    assert found(store, closed_from_unix_s=since) == expected
    store.close()


@pytest.mark.parametrize(
    ("wanted", "complaint"),
    [
        ({"state": 9}, "filter.state 9 is unknown"),
        ({"min_reward": math.nan}, "filter.min_reward is not a number"),
        ({"min_reward": 1, "max_reward": 0.5}, "min_reward 1 is above filter.max_reward 0.5"),
        ({"min_weight_version": 4, "max_weight_version": 3}, "min_weight_version 4 is above"),
        (
            {"closed_from_unix_s": 4, "closed_before_unix_s": 3},
            "closed_from_unix_s 1970-01-01T00:00:04Z is above",
        ),
        ({"state": OPEN, "domain": "code"}, "filter.domain is set, which no open"),
        ({"state": OPEN, "closed_from_unix_s": 1}, "filter.closed_from_unix_s is set"),
    ],
)
def test_filter_without_possible_matches_is_refused(store, wanted, complaint):
    """The message names the field and the value."""
    with pytest.raises(InvalidArgument, match=complaint):
        page(store, **wanted)


def test_page_token_belongs_to_one_filter_and_shard(filled):
    """An invented token, or one of another filter or shard, is refused with the reason."""
    token = page(filled, size=1).next_page_token
    with pytest.raises(InvalidArgument, match="another filter"):
        page(filled, token=token, domain="code")
    request = pool_pb2.QueryTrajectoriesRequest(page_token=token)
    with pytest.raises(InvalidArgument, match="of pool shard 's0', not of 's1'"):
        filled.read(lambda records: query.query(records, request, shard="s1"))
    for made_up in ("x", "%%%", base64.urlsafe_b64encode(b"made up").decode(), "é"):
        with pytest.raises(InvalidArgument, match="page_token"):
            page(filled, token=made_up)


def test_counts_cover_states_domains_and_waiting_groups(filled, monkeypatch):
    """Every trajectory and every group is counted once, in any number of slices; the oldest pending
    group is the first in the queue, and its sealed work waits longest."""
    put_groups(filled, make_group("b", 1), make_group("a", 2), make_group("z", 9))
    put_groups(filled, make_group("v", 0, purpose=common_pb2.PURPOSE_EVAL))
    put_groups(filled, make_group("e", 0))
    set_states(filled, change("e", common_pb2.GROUP_STATE_TRAINED))
    monkeypatch.setattr(stats_module, "SLICE", 2)
    tally, slices = Tally(), 1
    while filled.read(tally.advance):
        slices += 1
    stats = pool_pb2.GetPoolStatsResponse()
    tally.add_to(stats)
    assert slices > 4
    assert {
        (count.domain, count.state): (count.trajectories, count.turns, count.sampled_tokens)
        for count in stats.trajectory_counts
    } == {
        ("code", SEALED): (2, 3, 4),
        ("math", SEALED): (1, 1, 2),
        ("code", ABANDONED): (1, 1, 2),
        ("", OPEN): (1, 0, 0),
    }
    assert all(count.turn_bytes > 0 for count in stats.trajectory_counts if count.turns)
    assert {(count.purpose, count.state): count.groups for count in stats.group_counts} == {
        (common_pb2.PURPOSE_TRAIN, common_pb2.GROUP_STATE_PENDING): 3,
        (common_pb2.PURPOSE_TRAIN, common_pb2.GROUP_STATE_TRAINED): 1,
        (common_pb2.PURPOSE_EVAL, common_pb2.GROUP_STATE_PENDING): 1,
    }
    assert (stats.oldest_pending_task_id, stats.oldest_pending_queue_index) == ("b", 1)
    assert stats.oldest_pending_closed_unix_s == 10


@pytest.mark.parametrize("wanted", [{}, {"closed_from_unix_s": 5.0}])
@pytest.mark.parametrize(
    ("table", "suffix"),
    [(Table.TRAJECTORIES, b""), (Table.REWARDS, b"o")],
    ids=["header", "reward"],
)
def test_page_names_damaged_trajectories_and_continues(filled, wanted, table, suffix):
    """By id and along the change log, for any damaged record; the others are returned page by page.
    Without permission the page fails, so that a replica can repair itself."""
    key = trajectory_key(parse_trajectory_id("b:0:0")) + suffix
    filled.write(lambda records: records.put_checksummed(table, key, b"flipped"))
    with pytest.raises(DataLoss, match=f"in {table.value} does not match"):
        found(filled, **wanted)
    ids, damaged, token = [], [], ""
    while True:
        answer = page(filled, token=token, size=1, name_damaged=True, **wanted)
        ids += [summary.trajectory_id for summary in answer.trajectories]
        damaged += answer.damaged_trajectory_ids
        token = answer.next_page_token
        if not token:
            break
    assert "".join(name[0] for name in ids) == ("ace" if wanted else "acde")
    assert damaged == ["b:0:0"]


def test_page_of_damaged_trajectories_is_bounded(store, monkeypatch):
    """Damaged trajectories count as read: the next page continues behind them."""
    monkeypatch.setattr(query, "PAGE_COST", 2)
    for name in "abc":
        append(store, make_turn(f"{name}:0:0"))
        key = trajectory_key(parse_trajectory_id(f"{name}:0:0"))
        store.write(lambda records, key=key: records.put_checksummed(Table.TRAJECTORIES, key, b"?"))
    first = page(store, name_damaged=True)
    assert list(first.damaged_trajectory_ids) == ["a:0:0", "b:0:0"]
    last = page(store, name_damaged=True, token=first.next_page_token)
    assert (list(last.damaged_trajectory_ids), last.next_page_token) == (["c:0:0"], "")
