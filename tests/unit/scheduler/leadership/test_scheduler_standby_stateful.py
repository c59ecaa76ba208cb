"""A standby's copies after random histories of the shards, against a scan from the beginning.

Two real stores are written to as leaders, gateways and retention write to them, and now and then
opened again, compacted, or made to forget. The standby looks when it looks. Whenever it is elected
its term must hold and count what an instance would that reads every group there is.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from forge.core.errors import ForgeError
from forge.core.queue.admission import Mode, QueueSettings
from forge.core.queue.generation_queue import GenerationQueue
from forge.core.queue.groups import SAME_OUTCOME, Phase
from forge.core.tasks.task_digest import task_digest
from forge.v1 import common_pb2, pool_pb2
from services.pool.data.commands import FreeGroups, MarkOrphans
from services.pool.maintenance.compaction import NOTED_BYTES, Compactor
from services.pool.storage.change_trackers import RecentChanges
from services.pool.store import PoolStore
from services.scheduler.leadership.standby import RegisteredGroups, ShardCopies
from services.scheduler.state.queries.queue_status import status_of
from services.scheduler.state.term_state import TermState
from tests.support.pool.records import make_reward, make_turn
from tests.support.pool.store import append, change, commit, put_groups, reward, seal, set_states
from tests.support.scheduler.cluster import make_task
from tests.support.scheduler.standby import StoreScans, WholeScans, everything_in

SHARDS = ("s0", "s1")
TASKS = 12
STATES = ("BATCHED", "TRAINED", "TRAINED", "TRAINED", "TOMBSTONED", "PENDING")
MODES = {mode: QueueSettings(concurrency=4, window=4, mode=mode) for mode in Mode}

shards = st.sampled_from(SHARDS)
BATCHES = [*(f"batch-0-{step}" for step in range(1, 9)), "other"]

numbers = st.integers(0, TASKS - 1)
rollouts = st.tuples(st.integers(0, 1), st.sampled_from([0, 0, 1, 1000]))
values = st.sampled_from([0.0, 0.25, 1.0])


class StandbyMachine(RuleBasedStateMachine):
    """See the module's docstring."""

    @initialize(
        mode=st.sampled_from(Mode),
        skip=st.booleans(),
        remembered=st.sampled_from([2, 99]),
        most=st.sampled_from([1, 4, 99]),
    )
    def begin(self, mode: Mode, skip: bool, remembered: int, most: int) -> None:
        shared = Path("/dev/shm")
        self.root = Path(tempfile.mkdtemp(dir=shared if shared.is_dir() else None))
        self.loop = asyncio.new_event_loop()
        self.mode, self.skip, self.remembered = mode, skip, remembered
        self.now_unix_s = 1000.0
        self.known: dict[int, str] = {}
        """Where each group is, by number."""
        self.scans = StoreScans({shard: self._open(shard) for shard in SHARDS})
        self.most = most
        self.copies = ShardCopies(self.scans, most_settled=most)

    def _open(self, shard: str) -> PoolStore:
        store = PoolStore(self.root / shard, shard=shard)
        store._recent = RecentChanges(most_tasks=self.remembered)
        return store

    def _of(self, number: int) -> PoolStore:
        # What has no group yet is written to a shard all the same.
        return self.scans.stores[self.known.get(number, SHARDS[number % 2])]

    def _now(self) -> float:
        self.now_unix_s += 1.0
        return self.now_unix_s

    def _try(self, write: Any, *arguments: Any, **more: Any) -> None:
        try:
            write(*arguments, **more)
        except ForgeError:
            return  # A shard refuses what makes no sense.

    # What happens on the shards

    @rule(
        some=st.lists(numbers, min_size=1, max_size=6, unique=True),
        size=st.integers(1, 2),
        evaluation=st.booleans(),
        priority=st.integers(0, 3),
        digest=st.booleans(),
    )
    def submit(
        self, some: list[int], size: int, evaluation: bool, priority: int, digest: bool
    ) -> None:
        for number in some:
            if number in self.known:
                continue
            shard = self.known[number] = SHARDS[(number // 3) % 2]
            task = make_task(
                f"t{number}",
                domain=("code", "qa")[number % 2],
                size=size,
                evaluation=evaluation and number % 3 == 0,
                tag="x" if number % 4 == 0 else "",
            )
            task.priority = priority
            record = common_pb2.GroupRecord(
                task=task,
                queue_index=number,
                state=common_pb2.GROUP_STATE_PENDING,
                pool_shard=shard,
                task_digest=task_digest(task) if digest else b"",
            )
            put_groups(self._of(number), record)

    @rule(number=numbers, rollout=rollouts, value=values, sealed=st.integers(0, 3))
    def close(self, number: int, rollout: tuple[int, int], value: float, sealed: int) -> None:
        state = "SEALED" if sealed else "ABANDONED"
        self._try(
            seal,
            self._of(number),
            f"t{number}:{rollout[0]}:{rollout[1]}",
            turns=0,
            state=common_pb2.TrajectoryState.Value(f"TRAJECTORY_STATE_{state}"),
            domain="code",
            rewards=[make_reward(value=value)] if value else [],
            now_unix_s=self._now(),
        )

    @rule(number=numbers, rollout=rollouts)
    def begin_rollout(self, number: int, rollout: tuple[int, int]) -> None:
        self._try(append, self._of(number), make_turn(f"t{number}:{rollout[0]}:{rollout[1]}"))

    @rule(number=numbers, rollout=rollouts, value=values, event=st.sampled_from(["late", "later"]))
    def reward_late(self, number: int, rollout: tuple[int, int], value: float, event: str) -> None:
        trajectory_id = f"t{number}:{rollout[0]}:{rollout[1]}"
        self._try(reward, self._of(number), make_reward(event, value), trajectory_id=trajectory_id)

    @rule(
        some=st.lists(numbers, min_size=1, max_size=5, unique=True),
        state=st.sampled_from(STATES),
        step=st.integers(1, 3),
        reason=st.sampled_from(["gone", SAME_OUTCOME]),
    )
    def settle(self, some: list[int], state: str, step: int, reason: str) -> None:
        """Commits, gives up, or, as a rewind does, takes back."""
        for number in some:
            changed = change(
                f"t{number}",
                common_pb2.GroupState.Value(f"GROUP_STATE_{state}"),
                batch_id=f"batch-0-{step}" if state in ("BATCHED", "TRAINED") else "",
                step=step if state == "TRAINED" else 0,
                reason=reason if state == "TOMBSTONED" else "",
            )
            self._try(set_states, self._of(number), changed, now_unix_s=self._now())

    @rule(
        some=st.lists(numbers, min_size=2, max_size=8, unique=True),
        step=st.integers(1, 6),
        value=values,
    )
    def train(self, some: list[int], step: int, value: float) -> None:
        """Groups go the way they mostly go, some of them in the next step."""
        self.submit(some, size=2, evaluation=False, priority=0, digest=True)
        for place, number in enumerate(some):
            for rollout in range(2):
                self.close(number, (rollout, 0), value * place, sealed=1)
            self.settle([number], "TRAINED", step + place // 3, "")

    @rule(number=numbers, limit=st.sampled_from([1, 100]))
    def free(self, number: int, limit: int) -> None:
        """What retention does."""
        command = FreeGroups(
            task_ids=(f"t{number}",), covered_step=2, max_records=limit, now_unix_s=self._now()
        )
        commit(self._of(number), command)

    @rule(number=numbers)
    def give_up_orphan(self, number: int) -> None:
        command = MarkOrphans(task_ids=(f"t{number}",), now_unix_s=self._now())
        if number not in self.known:
            commit(self._of(number), command)

    # What happens to the shards

    @rule(shard=shards)
    def restart(self, shard: str) -> None:
        self.scans.stores[shard].close()
        self.scans.stores[shard] = self._open(shard)

    @rule(shard=shards)
    def exchange_file(self, shard: str) -> None:
        store = self.scans.stores[shard]
        store.environment.start_compaction_log(NOTED_BYTES)
        compactor = Compactor(store.environment, reserve_bytes=store.disk_reserve_bytes)
        compactor._copy_directory.mkdir()
        store.environment._lmdb.copy(str(compactor._copy_directory), compact=True)
        self._try(put_groups, store, fence=1)
        compactor._finish()
        compactor._clean()

    # What the standby does

    @rule(shard=shards)
    def look(self, shard: str) -> None:
        self.loop.run_until_complete(self.copies.refresh(shard))

    @rule(shard=shards, after=st.integers(0, 3))
    def look_in_vain(self, shard: str, after: int) -> None:
        """The shard is gone in the middle of its answer."""
        self.scans.break_after = after
        self._try(self.loop.run_until_complete, self.copies.refresh(shard))
        self.scans.break_after = None

    @precondition(lambda self: len(self.known) > 2)
    @rule(joins=st.booleans())
    def take_office(self, joins: bool) -> None:
        """With both shards, or with one that the other joins. Then stand by again.

        A term of a standby's copies, and one that scans what is pending and the newest settled
        groups, count what a term counts that reads every group of shards that cannot count.
        """
        every = self._registered(ShardCopies(WholeScans(self.scans.stores), most_settled=99))
        expected = self._term(every, joins=joins, one_by_one=True)
        for copies in (ShardCopies(self.scans, most_settled=self.most), self.copies):
            state = self._term(self._registered(copies), joins=joins)
            assert status_of(state, now_s=1.0) == status_of(expected, now_s=1.0)
            self._check_groups(state, expected)
            self._check_commits(state, expected)
        self.copies = ShardCopies(self.scans, most_settled=self.most)

    def _registered(self, copies: ShardCopies) -> RegisteredGroups:
        for shard in SHARDS:
            self.loop.run_until_complete(copies.refresh(shard, count=True))
        return copies.hand_over(SHARDS)

    def _check_groups(self, state: TermState, expected: TermState) -> None:
        """What is held is the same; what is not is settled, on a shard that is named, and read
        again by a rewind."""
        ledger, whole = state.queue.ledger, expected.queue.ledger
        for number, shard in self.known.items():
            group = whole.group(f"t{number}")
            if group.spec.task_id in ledger:
                held = ledger.group(group.spec.task_id)
                assert everything_in(held) == everything_in(group)
                continue
            assert group.phase.consumed
            assert shard in ledger.forgotten_shards
            if group.phase is Phase.TRAINED:
                assert shard in ledger.shards_to_recall(group.step - 1)
        assert ledger.window.next_index == whole.window.next_index
        assert ledger.next_eval_index == whole.next_eval_index
        assert ledger.window.head == whole.window.head

    def _check_commits(self, state: TermState, expected: TermState) -> None:
        """A batch is committed by the same step, be it known to the shards alone."""
        request = pool_pb2.LookUpGroupsRequest(batch_ids=BATCHES)
        answers = [store.look_up(request) for store in self.scans.stores.values()]
        stored = {one.batch_id: one.step for answer in answers for one in answer.commits}
        for batch_id in BATCHES:
            step = expected.queue.batches.committed_by(batch_id)
            assert stored.get(batch_id) == step
            assert state.queue.batches.committed_by(batch_id) in (step, None)

    def _term(self, found: RegisteredGroups, *, joins: bool, one_by_one: bool = False) -> TermState:
        queue = GenerationQueue(MODES[self.mode], term=1)
        state = TermState(
            queue, max_pending=100, skip_equal_rewards=self.skip, most_settled=self.most
        )
        if found.unbounded:
            state.settled.hold_all()
        queue.begin_at(found.head())
        if joins:
            found.groups.sort(key=attrgetter("group.spec.shard"))
        if one_by_one:
            for stored in found.groups:
                state.earlier.restore_one(stored, now_s=1.0)
        else:
            for _, groups in groupby(found.groups, key=attrgetter("group.spec.shard")):
                state.earlier.restore(groups, now_s=1.0)
        state.earlier.leave_out(found.left_out)
        return state

    def teardown(self) -> None:
        if not hasattr(self, "scans"):
            return
        try:
            self.take_office(joins=False)
        finally:
            for store in self.scans.stores.values():
                store.close()
            self.loop.close()
            shutil.rmtree(self.root)


FUZZ = settings.get_current_profile_name() == "fuzz"
StandbyMachine.TestCase.settings = settings(
    max_examples=450 if FUZZ else 55,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestStandby = StandbyMachine.TestCase
