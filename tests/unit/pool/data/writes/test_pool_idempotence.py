"""Reordered, repeated and interrupted writes: the store ends with the same trajectory."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from forge.core.trajectory import parse_trajectory_id
from forge.v1 import common_pb2
from services.pool import validation
from services.pool.data.commands import AppendTurns, SealTrajectory
from services.pool.store import PoolStore
from tests.support.pool.records import make_reward, make_turn

NAME = parse_trajectory_id("task:0:0")
TURNS = [make_turn(index=index, prefix=5 * index, version=index) for index in range(6)]
EXPECTED = common_pb2.Trajectory(
    trajectory_id="task:0:0",
    task_id="task",
    domain="code",
    state=common_pb2.TRAJECTORY_STATE_SEALED,
    turns=TURNS,
    rewards=[make_reward()],
    sealed_unix_s=1.0,
)


def seal(at_s: float) -> SealTrajectory:
    return SealTrajectory(
        trajectory=NAME,
        domain="code",
        turns=len(TURNS),
        rewards=(make_reward(),),
        state=common_pb2.TRAJECTORY_STATE_SEALED,
        reason="",
        sealed_unix_s=at_s,
    )


@st.composite
def deliveries(draw):
    """All turns in any order, some more than once, in commits of any size."""
    indices = list(range(len(TURNS))) + draw(st.lists(st.integers(0, len(TURNS) - 1), max_size=8))
    indices = draw(st.permutations(indices))
    commits = []
    while indices:
        size = draw(st.integers(1, len(indices)))
        commits.append(indices[:size])
        indices = indices[size:]
    return commits


@settings(max_examples=60, deadline=None)
@given(commits=deliveries(), restarts=st.sets(st.integers(0, 12)))
def test_turns_seal_equally_in_any_order_and_grouping(commits, restarts):
    """Turns reordered, repeated, grouped at will and cut by restarts seal into one trajectory, also
    if all of it is sent again."""
    with tempfile.TemporaryDirectory() as folder:
        store = PoolStore(Path(folder), map_bytes=1 << 20)
        for repeat in range(2):
            for number, indices in enumerate(commits):
                new = tuple(validation.new_turn(TURNS[i].SerializeToString()) for i in indices)
                assert store.commit([AppendTurns(turns=new)]) == [(None,) * len(new)]
                if number in restarts:
                    store.close()
                    store = PoolStore(Path(folder))
            (summary,) = store.commit([seal(at_s=1.0 + repeat)])
            assert (summary.turns, summary.max_weight_version) == (6, 5)
        (stored,) = store.trajectories([NAME])
        assert common_pb2.Trajectory.FromString(stored) == EXPECTED
        store.close()
