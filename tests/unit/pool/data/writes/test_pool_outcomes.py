"""A trajectory has one outcome."""

from __future__ import annotations

import pytest

from forge.core.errors import AlreadyExists
from forge.core.trajectory import parse_trajectory_id
from forge.v1 import common_pb2
from services.pool.data.writes import seal_trajectory
from tests.support.pool.records import make_reward, make_turn
from tests.support.pool.store import append, reward, seal, summary

OUTCOME = common_pb2.REWARD_KIND_OUTCOME


def test_second_outcome_is_refused_and_leaves_no_trace(store):
    """Before the seal, at the seal and after it, in one request or two: the whole request is
    refused."""
    two = (make_reward("a", 0.5, kind=OUTCOME), make_reward("b", 1000.0, kind=OUTCOME))
    for refused in (
        lambda: reward(store, *two, trajectory_id="new:0:0"),
        lambda: seal(store, "new:0:0", turns=0, rewards=two),
    ):
        with pytest.raises(AlreadyExists, match=r"new:0:0 has outcome 0\.5 .*'a'.* 1000 .*'b'"):
            refused()
    assert store.summaries([parse_trajectory_id("new:0:0")]) == []
    append(store, make_turn())
    reward(store, two[0])
    with pytest.raises(AlreadyExists):
        seal(store, rewards=[two[1]])
    seal(store, rewards=[two[0]])
    with pytest.raises(AlreadyExists):
        reward(store, make_reward("tidy"), two[1])
    with pytest.raises(AlreadyExists):
        seal(store, rewards=[two[1]])
    # The same event, also with another value, and other kinds are taken as before.
    seal(store, rewards=[make_reward("a", 7.0, kind=OUTCOME), make_reward("tidy")])
    stored = summary(store).rewards
    assert [(one.event_id, one.value) for one in stored] == [("a", 0.5), ("tidy", 1.0)]


def test_two_outcomes_of_earlier_versions_stay(store, monkeypatch):
    """A trajectory with two stored outcomes is read, sealed and acknowledged again, and gets no
    third."""
    two = (make_reward("a", 0.5, kind=OUTCOME), make_reward("b", 1000.0, kind=OUTCOME))
    append(store, make_turn())
    with monkeypatch.context() as earlier:
        earlier.setattr(seal_trajectory, "check_rewards", lambda *_, **__: None)
        reward(store, *two)
    seal(store, rewards=two)
    assert seal(store, rewards=two).rewards == [*two]
    with pytest.raises(AlreadyExists):
        reward(store, make_reward("c", kind=OUTCOME))
