"""Random interleavings of every operation of the generation queue, crashes included.

The machine plays the operator, runners, a pool and trainers around the real queue, and keeps the
simplest possible model of what must be true. A crash throws the queue away and rebuilds it from
what was durable, while runners and trainers go on with what they held.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from forge.core.activity import Activity
from forge.core.admission import Admission, Mode, PartialGroups, QueueSettings
from forge.core.batches import Batch
from forge.core.errors import NotFound
from forge.core.generation import GenerationQueue
from forge.core.groups import AttemptState, Group, GroupSpec, Phase
from forge.core.rollouts import RolloutClaim
from forge.core.trajectory import TaskId, parse_trajectory_id
from tests.support.durable_group import Durable
from tests.support.queue_invariants import QueueInvariants

DOMAINS = ("code", "qa", "general")
SHARDS = ("s0", "s1")
TRAINERS = ("t0", "t1")


class GenerationQueueMachine(QueueInvariants):
    """See the module's docstring."""

    @initialize(
        concurrency=st.integers(1, 4),
        window=st.integers(1, 6),
        admission=st.sampled_from(Admission),
        shares=st.sampled_from([{}, {"code": 1.0, "qa": 1.0}, {"code": 3.0, "general": 1.0}]),
        mode=st.sampled_from([*Mode, Mode.WINDOWED, Mode.ADAPTIVE]),
        limits=st.sampled_from([{}, {"code": 1}]),
        partial=st.sampled_from(PartialGroups),
    )
    def begin(
        self,
        concurrency: int,
        window: int,
        admission: Admission,
        shares: dict[str, float],
        mode: Mode,
        limits: dict[str, int],
        partial: PartialGroups,
    ) -> None:
        self.settings = QueueSettings(
            concurrency=concurrency,
            mode=mode,
            window=window,
            batch_groups=window,
            max_staleness_p99=2.0,
            max_shift_kl=0.2,
            admission=admission,
            domain_shares=shares,
            domain_limits=limits,
            rollout_lease_s=10.0,
            rollout_timeout_s=60.0,
            partial_groups=partial,
            max_attempts=2,
            retry_backoff_s=1.0,
            batch_lease_s=30.0,
            short_batch_after_s=2.0,
        )
        self.now_s = 0.0
        self.term = 0
        self.next_index = {False: 0, True: 0}
        self.pool: dict[TaskId, Durable] = {}
        self.held: dict[str, RolloutClaim] = {}
        """What runners hold, or believe to hold."""
        self.batches: dict[str, tuple[str, tuple[TaskId, ...]]] = {}
        """Per trainer: the batch it works on, or believes to."""
        self.trained: dict[TaskId, int] = {}
        """The surviving lineage: step by group."""
        self.step = 0
        self.failed: set[str] = set()
        """Attempts that this leader counted as failed."""
        self.revoked: set[str] = set()
        """Batches that a rewind took back."""
        self.void_before = (0, 0)
        """What of that is durable."""
        self.queue = GenerationQueue(self.settings)
        self.announced = self.queue.books.window, 0

    # Operator

    @rule(
        size=st.integers(1, 3),
        domain=st.sampled_from(DOMAINS),
        shard=st.sampled_from(SHARDS),
        evaluation=st.sampled_from([False, False, False, True]),
        priority=st.sampled_from([0, 0, 0, 1, 3, 2**32 - 1]),
        count=st.sampled_from([1, 1, 4]),
    )
    def submit(
        self, size: int, domain: str, shard: str, evaluation: bool, priority: int, count: int
    ) -> None:
        for _ in range(count):
            self._submit(size, domain, shard, evaluation, priority)

    def _submit(self, size: int, domain: str, shard: str, evaluation: bool, priority: int) -> None:
        spec = GroupSpec(
            task_id=TaskId(f"task-{len(self.pool)}"),
            index=self.next_index[evaluation],
            domain=domain,
            shard=shard,
            size=size,
            evaluation=evaluation,
            priority=priority,
        )
        self.next_index[evaluation] += 1
        self.pool[spec.task_id] = Durable(spec)
        self.queue.add(Group(spec), now_s=self.now_s)

    @rule(activity=st.sampled_from([Activity.RUNNING, *Activity]))
    def set_activity(self, activity: Activity) -> None:
        """Pause, drain or resume; it is on record before it holds."""
        self.queue.books.activity = activity

    @rule(data=st.data())
    def skip(self, data: st.DataObject) -> None:
        """A complete group turns out to teach nothing, and is given up before a trainer has it."""
        complete = [g for g in self._groups() if g.phase is Phase.COMPLETE]
        if complete:
            self.queue.books.tombstone(data.draw(st.sampled_from(complete)), "teaches nothing")

    # Runners

    @rule(count=st.integers(1, 4))
    def lease(self, count: int) -> None:
        books, running = self.queue.books, self.queue.books.running_training()
        queued = {group for group in self._groups() if group.phase is Phase.QUEUED}
        claims = self.queue.rollouts.lease(runner_id="r", max_rollouts=count, now_s=self.now_s)
        assert not claims or books.activity is not Activity.PAUSED
        assert books.running_training() <= running or books.activity is Activity.RUNNING
        for claim in claims:
            assert claim.trajectory_id not in self.held, "an attempt was handed out twice"
            self.held[claim.trajectory_id] = claim
        self.check_order(claims)
        self.check_reach(queued)
        self.check_ahead(queued)

    @precondition(lambda self: self.failed)
    @rule(data=st.data())
    def end_lost_rollout(self, data: st.DataObject) -> None:
        """A runner that did not hear that its claim was lost seals all the same."""
        trajectory_id = data.draw(st.sampled_from(sorted(self.failed)))
        self.held.pop(trajectory_id, None)
        self._seal(trajectory_id)
        self._report(trajectory_id, permanent=False)

    @rule(count=st.integers(1, 8))
    def work(self, count: int) -> None:
        """Runners get some rollouts done: without it, little would ever be trained."""
        before = set(self.held)
        self.lease(count)
        for trajectory_id in sorted(set(self.held) - before):
            del self.held[trajectory_id]
            self._seal(trajectory_id)
            self._report(trajectory_id, permanent=False)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), sealed=st.booleans(), told=st.booleans(), permanent=st.booleans())
    def end_rollout(self, data: st.DataObject, sealed: bool, told: bool, permanent: bool) -> None:
        """A rollout ends: sealed or not, and its runner says so or dies."""
        trajectory_id = data.draw(st.sampled_from(sorted(self.held)))
        del self.held[trajectory_id]
        if sealed:
            self._seal(trajectory_id)
        if told:
            self._report(trajectory_id, permanent=permanent and not sealed)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        trajectory_id = data.draw(st.sampled_from(sorted(self.held)))
        if not self.queue.rollouts.renew(trajectory_id, now_s=self.now_s):
            del self.held[trajectory_id]
        else:
            assert trajectory_id not in self.failed, "a claim came back from the dead"

    @rule(seconds=st.sampled_from([0.5, 3.0, 11.0, 35.0]))
    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        for trajectory_id in self.queue.expire(self.now_s):
            if self._spec(trajectory_id).shard not in self.queue.books.away:
                self._report(trajectory_id, permanent=False)

    def _seal(self, trajectory_id: str) -> None:
        name = parse_trajectory_id(trajectory_id)
        attempts = self.pool[name.task_id].attempts
        attempts[name.rollout_index, name.attempt] = AttemptState.SEALED

    def _report(self, trajectory_id: str, *, permanent: bool) -> None:
        """What the service does with a report: the pool has the last word."""
        name = parse_trajectory_id(trajectory_id)
        attempts = self.pool[name.task_id].attempts
        if attempts.get((name.rollout_index, name.attempt)) is AttemptState.SEALED:
            self.queue.rollouts.complete(trajectory_id, now_s=self.now_s)
        elif self.queue.rollouts.fail(
            trajectory_id, reason="died", permanent=permanent, now_s=self.now_s
        ):
            self.failed.add(trajectory_id)

    # Pool

    @rule(shards=st.sampled_from([(), (), ("s0",), ("s1",), SHARDS]))
    def lose_shards(self, shards: tuple[str, ...]) -> None:
        self.queue.books.away = frozenset(shards)

    @rule(keep=st.integers(0, 3))
    def store_fates(self, keep: int) -> None:
        """The ledger catches up; what it has not stored a crash forgets."""
        for group in self.queue.books.settled()[keep:]:
            self.pool[group.spec.task_id].phase = group.phase

    # Trainers

    @rule(trainer=st.sampled_from(TRAINERS), size=st.integers(1, 5))
    def take(self, trainer: str, size: int) -> None:
        head, away = self._head(), self.queue.books.away
        edge = self.queue.books.window.edge
        batch = self.queue.take(trainer_id=trainer, max_groups=size, now_s=self.now_s)
        if batch is None:
            return
        held = self.batches.get(trainer)
        if held is None or held[0] != batch.batch_id:
            assert self.queue.books.activity is not Activity.PAUSED
            self._check_batch(batch, size, range(head, edge), away)
        self.batches[trainer] = (batch.batch_id, batch.task_ids)

    def _check_batch(self, batch: Batch, size: int, seen: range, away: frozenset[str]) -> None:
        assert 0 < len(batch.task_ids) <= size
        assert len(set(batch.task_ids)) == len(batch.task_ids)
        for task_id in batch.task_ids:
            durable = self.pool[task_id]
            assert durable.spec.index in seen, "beyond what was announced"
            assert not durable.spec.evaluation
            assert durable.spec.shard not in away
            assert task_id not in self.trained
            sealed = {key[0] for key, state in durable.attempts.items() if state.name == "SEALED"}
            assert sealed == set(range(durable.spec.size)), "a partial group was handed out"
            counted = self.queue.books.group(task_id).sealed_ids()
            assert len(counted) == durable.spec.size

    @rule(size=st.integers(1, 4))
    def train(self, size: int) -> None:
        """One step as a rule goes: taken and committed."""
        self.batches.pop("t2", None)
        self.take("t2", size)
        if "t2" in self.batches:
            self._commit_again("t2", self.step + 1)

    @precondition(lambda self: self.batches)
    @rule(
        data=st.data(),
        named=st.booleans(),
        crash=st.sampled_from(["", "", "before", "within", "trainer"]),
    )
    def commit(self, data: st.DataObject, named: bool, crash: str) -> None:
        """Write, then apply; the leader may die before, or the leader or the trainer with a part
        of the groups stored."""
        trainer = data.draw(st.sampled_from(sorted(self.batches)))
        batch_id, task_ids = self.batches.pop(trainer)
        step = self.step + 1
        try:
            stored = self.queue.batches.prepare_commit(
                batch_id, step=step, task_ids=task_ids if named else (), now_s=self.now_s
            )
        except NotFound:
            return
        assert set(stored) <= set(task_ids)
        assert batch_id not in self.revoked, "what a rewind took back was committed"
        if crash == "trainer":
            for task_id in stored[: (len(stored) + 1) // 2]:
                durable = self.pool[task_id]
                durable.phase, durable.batch_id, durable.step = Phase.TRAINED, batch_id, step
            self.rewind(back=0)
            return
        if crash:
            kept = stored[: len(stored) // 2] if crash == "within" else ()
            self._store_trained(kept, batch_id, step)
            self.crash()
            # The trainer tries again until it is told.
            self.batches[trainer] = (batch_id, task_ids)
            self._commit_again(trainer, step)
            return
        self.step = step
        self._store_trained(stored, batch_id, step)
        self.queue.batches.commit(batch_id, step=step)
        assert (
            self.queue.batches.prepare_commit(
                batch_id, step=step, task_ids=task_ids, now_s=self.now_s
            )
            == ()
        )

    def _commit_again(self, trainer: str, step: int) -> None:
        batch_id, task_ids = self.batches.pop(trainer)
        left = self.queue.batches.prepare_commit(
            batch_id, step=step, task_ids=task_ids, now_s=self.now_s
        )
        self.step = step
        self._store_trained(left, batch_id, step)
        self.queue.batches.commit(batch_id, step=step)
        assert all(self.trained[task_id] == step for task_id in task_ids)

    def _store_trained(self, task_ids: tuple[TaskId, ...], batch_id: str, step: int) -> None:
        for task_id in task_ids:
            assert task_id not in self.trained, "trained twice in one lineage"
            self.trained[task_id] = step
            durable = self.pool[task_id]
            durable.phase, durable.batch_id, durable.step = Phase.TRAINED, batch_id, step

    @precondition(lambda self: self.batches)
    @rule(data=st.data(), bad=st.booleans())
    def release(self, data: st.DataObject, bad: bool) -> None:
        trainer = data.draw(st.sampled_from(sorted(self.batches)))
        batch_id, _ = self.batches.pop(trainer)
        reason = "cannot be trained on" if bad else ""
        for task_id in self.queue.batches.prepare_release(batch_id, now_s=self.now_s):
            if bad:
                self.pool[task_id].phase = Phase.TOMBSTONED
        self.queue.batches.release(batch_id, reason=reason)

    @precondition(lambda self: self.step > 0)
    @rule(back=st.integers(1, 3))
    def rewind(self, back: int) -> None:
        """A trainer died and restored the checkpoint of an earlier step."""
        step = max(0, self.step - back)
        self.revoked |= {batch_id for batch_id, _ in self.batches.values()}
        undone = self.queue.batches.prepare_rewind(step)
        trained = {task for task, trained in self.trained.items() if trained > step}
        assert trained <= set(undone) <= trained | (self.pool.keys() - self.trained.keys())
        self.void_before = self.queue.batches.void_before
        for task_id in undone:
            self.trained.pop(task_id, None)
            self.pool[task_id].phase = Phase.QUEUED
        assert self.queue.batches.rewind(step) == len(trained)
        stored = {task for task, durable in self.pool.items() if durable.phase is Phase.TRAINED}
        assert stored == self.trained.keys(), "a step that never was is on record"
        self.announced = self.queue.books.window, self.queue.books.window.edge
        self.step = step
        assert all(group.phase is not Phase.BATCHED for group in self._groups())

    # Leaders

    @rule()
    def crash(self) -> None:
        """The leader dies; the next one knows what was durable, and nothing else."""
        self.term += 1
        self.failed.clear()
        activity = self.queue.books.activity
        self.queue = GenerationQueue(self.settings, term=self.term, void_before=self.void_before)
        self.queue.books.activity = activity
        for durable in sorted(self.pool.values(), key=lambda one: one.spec.index):
            self.queue.add(durable.restored(), now_s=self.now_s)

    def teardown(self) -> None:
        """From wherever this went, the queue can be worked off to its end."""
        if not hasattr(self, "queue"):
            return
        self.queue.books.away = frozenset()
        self.queue.books.activity = Activity.RUNNING
        for _ in range(20 * len(self.pool) + 20):
            if self._worked_off():
                return
            self.pass_time(35.0)
            for claim in self.queue.rollouts.lease(
                runner_id="last", max_rollouts=100, now_s=self.now_s
            ):
                self._seal(claim.trajectory_id)
                self._report(claim.trajectory_id, permanent=False)
            batch = self.queue.take(trainer_id="last", max_groups=3, now_s=self.now_s)
            if batch is not None:
                self.batches["last"] = (batch.batch_id, batch.task_ids)
                self._commit_again("last", self.step + 1)
        raise AssertionError(f"stuck: {self.queue.books.status()}")

    def _worked_off(self) -> bool:
        status = self.queue.books.status()
        return status.pending == 0 and status.eval_pending == 0

    def _spec(self, trajectory_id: str) -> GroupSpec:
        return self.pool[parse_trajectory_id(trajectory_id).task_id].spec


GenerationQueueMachine.TestCase.settings = settings(
    max_examples=250,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestGenerationQueue = GenerationQueueMachine.TestCase
