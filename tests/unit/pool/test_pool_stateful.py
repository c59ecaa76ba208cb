"""Random histories of one shard beside the simplest model of it.

Commands come one by one and several in a transaction, good, repeated, stale and wrong ones. In
between the process dies, which leaves what lies in the file, and the file is compacted while it is
written to. After each step everything that can be read is what the model says.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from forge.core.errors import ForgeError, NotFound
from forge.core.trajectory import parse_trajectory_id
from forge.v1 import common_pb2, pool_pb2
from services.pool import validation
from services.pool.data.commands import (
    AppendTurns,
    Command,
    FreeGroups,
    MarkOrphans,
    SetGroupStates,
)
from services.pool.data.removal.freed_groups import Freed
from services.pool.data.writes.store_groups import fence_of
from services.pool.maintenance.backup import backup
from services.pool.maintenance.compaction import NOTED_BYTES, Compactor
from services.pool.maintenance.index_integrity import index_damage
from services.pool.storage.change_log import changes_after
from services.pool.storage.environment.file_locks import DATA
from services.pool.storage.keys import name_of_trajectory_key
from services.pool.store import PoolStore
from tests.support.pool.model import TRAINED, PoolModel
from tests.support.pool.records import make_group, make_reward, make_turn
from tests.support.pool.store import counted, groups_page, is_left_out, pages

SHARD = "s0"
TASKS = ["a", "b"]
MAP_BYTES = 1 << 18
"""So little that the map grows now and then."""
CHANGES_S = 1.0
"""From one command to the next."""

task_ids = st.sampled_from(TASKS)
trajectory_ids = st.builds("{}:{}:0".format, task_ids, st.integers(0, 1))
fences = st.sampled_from([2, 3, 3, 3, 3, 3])
rewards = st.builds(
    make_reward,
    st.sampled_from(["outcome", "x", "y"]),
    st.sampled_from([0.0, 0.25, -1.5]),
    turn_index=st.sampled_from([-1, -1, 0, 1]),
    kind=st.sampled_from([None, None, common_pb2.REWARD_KIND_OUTCOME]),
)


@st.composite
def new_turns(draw: st.DrawFn) -> Any:
    index = draw(st.sampled_from([0, 0, 1]))
    turn = make_turn(
        draw(trajectory_ids),
        index,
        # One that its parent cannot have makes a trajectory that is never sealed.
        prefix=draw(st.sampled_from([0, 0, 5, 5, 5, 99])) if index else 0,
        version=draw(st.sampled_from([1, 1, 1, 2])),
        messages_json="x" * draw(st.sampled_from([0, 0, 0, 10_000])),
    )
    return validation.new_turn(turn.SerializeToString())


@st.composite
def seals(draw: st.DrawFn) -> Command:
    state = draw(st.sampled_from(["SEALED", "SEALED", "SEALED", "ABANDONED"]))
    request = pool_pb2.SealTrajectoryRequest(
        trajectory_id=draw(trajectory_ids),
        domain="code",
        turns=draw(st.sampled_from([0, 1, 1, 2, 2])),
        rewards=draw(st.lists(rewards, max_size=1)),
        state=common_pb2.TrajectoryState.Value(f"TRAJECTORY_STATE_{state}"),
        reason="given up" if state == "ABANDONED" else "",
    )
    return validation.seal_trajectory(request, now_unix_s=0.0)


@st.composite
def late_rewards(draw: st.DrawFn) -> Command:
    request = pool_pb2.AppendRewardsRequest(
        trajectory_id=draw(trajectory_ids), rewards=draw(st.lists(rewards, min_size=1, max_size=2))
    )
    return validation.append_rewards(request)


@st.composite
def groups(draw: st.DrawFn) -> Command:
    request = pool_pb2.PutGroupsRequest(
        groups=[make_group(one, TASKS.index(one)) for one in draw(st.lists(task_ids, max_size=2))],
        fence=draw(fences),
    )
    return validation.put_groups(request, shard=SHARD)


@st.composite
def states(draw: st.DrawFn) -> Command:
    def change(task_id: str) -> pool_pb2.SetGroupStatesRequest.Change:
        state = draw(st.sampled_from(["PENDING", "BATCHED", "TRAINED", "TRAINED", "TOMBSTONED"]))
        return pool_pb2.SetGroupStatesRequest.Change(
            task_id=task_id,
            state=common_pb2.GroupState.Value(f"GROUP_STATE_{state}"),
            batch_id="batch" if state in ("BATCHED", "TRAINED") else "",
            step=draw(st.integers(1, 2)) if state == "TRAINED" else 0,
        )

    changed = draw(st.lists(task_ids, min_size=1, max_size=2, unique=True))
    request = pool_pb2.SetGroupStatesRequest(
        changes=map(change, changed), fence=draw(fences), tombstone_freed=draw(st.booleans())
    )
    return validation.set_group_states(request, now_unix_s=0.0)


some_tasks = st.lists(task_ids, min_size=1, max_size=2, unique=True).map(tuple)
commands = st.one_of(
    st.lists(new_turns(), min_size=1, max_size=3).map(lambda some: AppendTurns(turns=tuple(some))),
    st.lists(new_turns(), min_size=1, max_size=3).map(lambda some: AppendTurns(turns=tuple(some))),
    seals(),
    seals(),
    late_rewards(),
    groups(),
    states(),
    st.builds(
        FreeGroups,
        task_ids=some_tasks,
        covered_step=st.integers(0, 2),
        max_records=st.sampled_from([1, 2, 100]),
        now_unix_s=st.just(0.0),
    ),
    st.builds(MarkOrphans, task_ids=some_tasks, now_unix_s=st.just(0.0)),
)


class PoolMachine(RuleBasedStateMachine):
    """See the module's docstring."""

    @initialize()
    def begin(self) -> None:
        shared = Path("/dev/shm")
        self.root = Path(tempfile.mkdtemp(dir=shared if shared.is_dir() else None))
        self.lives = 0
        self.now_unix_s = 100.0
        self.model = PoolModel()
        self.compactor: Compactor | None = None
        self.mark = ""
        self.scanned: dict[str, pool_pb2.ScanGroupsResponse] = {}
        self.store = self._open()

    def _open(self) -> PoolStore:
        return PoolStore(self._directory(), shard=SHARD, map_bytes=MAP_BYTES)

    def _directory(self) -> Path:
        return self.root / str(self.lives)

    @rule(command=commands)
    def commit_one(self, command: Command) -> None:
        self.commit([command])

    @rule(several=st.lists(commands, min_size=2, max_size=8))
    def commit(self, several: list[Command]) -> None:
        """One transaction: each command is answered as if it were alone."""
        several = [self._now(command) for command in several]
        answers = self.store.commit(several)
        for command, answer in zip(several, answers, strict=True):
            assert _told(answer) == self.model.apply(command), command

    @rule()
    def start_over(self) -> None:
        """All groups are pending again; freed ones, also half-freed ones, are tombstoned."""
        pending = common_pb2.GroupRecord(state=common_pb2.GROUP_STATE_PENDING)
        groups = [k for k, one in self.model.groups.items() if one.record is not None]
        states = dict.fromkeys(groups, pending)
        self.commit([SetGroupStates(states=states, fence=3, tombstone_freed=True, now_unix_s=0.0)])

    def _now(self, command: Command) -> Command:
        self.now_unix_s += CHANGES_S
        for moment in ("now_unix_s", "sealed_unix_s"):
            if hasattr(command, moment):
                changes: dict[str, Any] = {moment: self.now_unix_s}
                return replace(command, **changes)
        return command

    @rule()
    def scan(self) -> None:
        """What was told before, with what was changed since in its place, is what there is."""
        since = self.store.changed_since(self.mark)
        whole = groups_page(self.store, brief=True).groups
        if since.task_ids is None:
            self.scanned, told = {}, whole
        else:
            told = pages(self.store.scan_tasks(since.task_ids))
        self.scanned |= {one.group.task.task_id: one for one in told}
        self.mark = since.mark
        assert self.scanned == {one.group.task.task_id: one for one in whole}

    @rule(limit=st.integers(1, 2))
    def scan_bounded(self, limit: int) -> None:
        """It has what is pending and the newest settled groups; counters have all that are
        settled."""
        found = self.store.scan_newest(limit, whole=True, counts=True)
        assert found is not None
        settled, scan = found
        told = {one.group.task.task_id: one for one in pages(scan)}
        whole = {one.group.task.task_id: one for one in groups_page(self.store, brief=True).groups}
        assert all(whole[task_id] == one for task_id, one in told.items())
        for task_id in whole.keys() - told.keys():
            assert is_left_out(whole[task_id].group, settled), task_id
        assert counted(settled) == self.model.settled_counts()
        assert len(told) >= min(limit, len(whole))

    @rule(step=st.integers(0, 3))
    def scan_trained(self, step: int) -> None:
        told = [one.group for one in pages(self.store.scan_trained(after=step))]
        assert [group.step for group in told] == sorted(group.step for group in told)
        assert {group.task.task_id for group in told} == {
            task_id
            for task_id, group in self.model.groups.items()
            if group.state == TRAINED and group.step > step
        }

    @rule()
    def look_up(self) -> None:
        """Groups as they are, and which batch trained them."""
        groups = {k: one for k, one in self.model.groups.items() if one.record is not None}
        batches = {one.batch_id: one.step for one in groups.values() if one.state == TRAINED}
        request = pool_pb2.LookUpGroupsRequest(
            task_ids=[*TASKS, "other"], batch_ids=[*batches, "batch-9-9"]
        )
        answer = self.store.look_up(request)
        assert {one.task.task_id: one.state for one in answer.groups} == {
            task_id: one.state for task_id, one in groups.items()
        }
        assert {one.batch_id: one.step for one in answer.commits}.keys() == batches.keys()
        assert answer.answered == len(request.task_ids) + len(request.batch_ids)

    @rule()
    def die(self) -> None:
        """What lies in the file is what there is."""
        before = self._directory()
        self.lives += 1
        self._directory().mkdir()
        shutil.copy(before / DATA, self._directory() / DATA)
        self.store.close()
        self.compactor = None
        self.store = self._open()
        assert self.store.changed_since(self.mark).task_ids is None

    @precondition(lambda self: self.compactor is None)
    @rule()
    def begin_compacting(self) -> None:
        """The file is copied; what is changed from now on is noted."""
        environment = self.store.environment
        environment.start_compaction_log(NOTED_BYTES)
        self.compactor = Compactor(
            self.store.environment, reserve_bytes=self.store.disk_reserve_bytes
        )
        self.compactor._copy_directory.mkdir()
        environment._lmdb.copy(str(self.compactor._copy_directory), compact=True)

    @precondition(lambda self: self.compactor is not None)
    @rule()
    def end_compacting(self) -> None:
        """What was noted is brought into the copy, which takes the file's place."""
        assert self.compactor is not None
        self.compactor._finish()
        self.compactor._clean()
        self.compactor = None

    @invariant()
    def reads_as_the_model(self) -> None:
        store, model = self.store, self.model
        assert groups_page(store).groups == model.queue()
        names = sorted(model.trajectories, key=str)
        assert store.summaries(names) == [model.summary(name) for name in names]
        for text in (f"{task_id}:{rollout}:0" for task_id in TASKS for rollout in range(2)):
            self._fetches(text)
        assert store.read(fence_of) == model.fence
        damage = store.read(lambda records: list(index_damage(records, readable=True)))
        assert [found for found in damage if found is not None] == []

    def _fetches(self, trajectory_id: str) -> None:
        name = parse_trajectory_id(trajectory_id)
        content = self.model.content(name)
        if content is None:
            with pytest.raises(NotFound):
                self.store.trajectories([name])
        else:
            (stored,) = self.store.trajectories([name])
            assert common_pb2.Trajectory.FromString(stored) == content

    @invariant()
    def is_indexed_as_the_model(self) -> None:
        store, model = self.store, self.model
        settled = [
            (one.settled_unix_s, one.task_id, one.step, one.orphan)
            for one in store.settled(after=b"", limit=100)
        ]
        assert settled == model.settled()
        assert sorted(store.orphans(after=b"", limit=100).task_ids) == model.orphans()
        logged = store.read(lambda records: [change for _, change in changes_after(records, 0)])
        assert [(one.kind, name_of_trajectory_key(one.trajectory)) for one in logged] == (
            model.changes
        )
        stats = store.stats()
        assert stats.trajectories == len(model.trajectories)
        assert stats.turns == sum(len(one.turns) for one in model.trajectories.values())

    def teardown(self) -> None:
        """Whatever happened, a check finds no damage."""
        if not hasattr(self, "store"):
            return
        self.store.close()
        try:
            assert list(backup.check(self._directory(), lambda done, total: None)) == []
        finally:
            shutil.rmtree(self.root)


def _told(answer: Any) -> Any:
    """An answer as the model gives it."""
    match answer:
        case tuple():
            return tuple(map(_told, answer))
        case ForgeError():
            return type(answer)
        case Freed():
            return replace(answer, payload_bytes=0)
    return answer


FUZZ = settings.get_current_profile_name() == "fuzz"
PoolMachine.TestCase.settings = settings(
    max_examples=600 if FUZZ else 75,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestPool = PoolMachine.TestCase
