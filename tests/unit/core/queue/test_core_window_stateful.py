"""Random interleavings of every operation of the generation queue, crashes included.

The machine plays the operator, runners, a pool and trainers around the real queue, and keeps the
simplest possible model of what must be true. A crash throws the queue away and rebuilds it from
what was durable, while runners and trainers go on with what they held.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from forge.core.errors import InvalidArgument
from forge.core.queue.activity import Activity
from forge.core.queue.admission import GenerationLimit, Mode, PartialGroups, QueueSettings
from forge.core.queue.dispatch.failures import FailureKind
from forge.core.queue.generation_queue import GenerationQueue
from forge.core.queue.groups import AttemptState, Group, GroupSpec, Phase
from forge.core.trajectory import TaskId, parse_trajectory_id
from tests.support.core.durable_group import Durable
from tests.support.core.queue_trainers import QueueTrainers

DOMAINS = ("code", "qa", "general")
SHARDS = ("s0", "s1")


def _may_move(group: Group) -> bool:
    return group.idle or group.phase.consumed


class GenerationQueueMachine(QueueTrainers):
    """See the module's docstring."""

    @initialize(
        concurrency=st.integers(1, 4),
        window=st.integers(1, 6),
        admission=st.sampled_from(GenerationLimit),
        ahead=st.integers(0, 5),
        shares=st.sampled_from([{}, {"code": 1.0, "qa": 1.0}, {"code": 3.0, "general": 1.0}]),
        mode=st.sampled_from([*Mode, Mode.WINDOWED, Mode.ADAPTIVE]),
        limits=st.sampled_from([{}, {"code": 1}]),
        partial=st.sampled_from(PartialGroups),
        groups=st.integers(0, 8),
        most_settled=st.sampled_from([0, 0, 2, 99]),
    )
    def begin(
        self,
        concurrency: int,
        window: int,
        admission: GenerationLimit,
        ahead: int,
        shares: dict[str, float],
        mode: Mode,
        limits: dict[str, int],
        partial: PartialGroups,
        groups: int,
        most_settled: int,
    ) -> None:
        self.settings = QueueSettings(
            concurrency=concurrency,
            mode=mode,
            window=window,
            batch_groups=window,
            max_staleness_p99=2.0,
            max_shift_kl=0.2,
            admission=admission,
            ahead=ahead,
            domain_shares=shares,
            domain_limits=limits,
            rollout_lease_s=10.0,
            rollout_timeout_s=60.0,
            partial_groups=partial,
            max_attempts=2,
            max_losses=3,
            retry_backoff_s=1.0,
            batch_lease_s=30.0,
            short_batch_after_s=2.0,
        )
        self.most_settled = most_settled
        self.now_s = 0.0
        self.term = 0
        self.next_index = {False: 0, True: 0}
        self.pool = {}
        self.held = {}
        self.batches = {}
        self.trained = {}
        self.step = 0
        self.failed = set()
        self.left_behind = set[str]()  # attempts that groups left on another shard in this term
        self.own_failures: set[str] = set()
        self.revoked = set()
        self.void_before = (0, 0)
        self.late_writes = []
        self.done = {}
        self.gone = {}
        self.queue = GenerationQueue(self.settings)
        self.announced = self.queue.window, 0
        for index in range(groups):
            self._submit(domain=DOMAINS[index % 3], shard=SHARDS[index % 2], size=1 + index % 2)

    # Operator

    @rule(
        size=st.integers(1, 3),
        domain=st.sampled_from(DOMAINS),
        shard=st.sampled_from(SHARDS),
        evaluation=st.sampled_from([False, False, False, True]),
        priority=st.sampled_from([0, 0, 0, 1, 3, 2**32 - 1]),
        difficulty=st.sampled_from([0.0, 0.0, 0.5, 1.0]),
        count=st.sampled_from([1, 1, 4]),
    )
    def submit(self, count: int, **task: Any) -> None:
        for _ in range(count):
            self._submit(**task)

    def _submit(self, *, evaluation: bool = False, **task: Any) -> None:
        task_id, index = TaskId(f"task-{len(self.pool)}"), self.next_index[evaluation]
        spec = GroupSpec(task_id=task_id, index=index, evaluation=evaluation, **task)
        self.next_index[evaluation] += 1
        self.pool[spec.task_id] = Durable(spec)
        self.queue.add_group(Group(spec), now_s=self.now_s)

    @precondition(lambda self: self.pool)
    @rule(data=st.data())
    def submit_again(self, data: st.DataObject) -> None:
        """An id is accepted once; whether one that is not held was, the pool tells."""
        known = self.pool[data.draw(st.sampled_from(sorted(self.pool)))].spec
        if known.task_id not in self.queue.ledger:
            return
        with pytest.raises(InvalidArgument, match="was submitted before"):
            self.queue.add_group(Group(replace(known, index=len(self.pool))), now_s=self.now_s)

    @rule(activity=st.sampled_from([Activity.RUNNING] * 5 + [*Activity]))
    def set_activity(self, activity: Activity) -> None:
        """Pause, drain or resume; it is on record before it holds."""
        self.queue.set_activity(activity)

    @rule(data=st.data())
    def skip(self, data: st.DataObject) -> None:
        """A complete group turns out to teach nothing, and is given up before a trainer has it."""
        complete = [g for g in self._groups() if g.phase is Phase.COMPLETE]
        if complete:
            self.queue.ledger.tombstone(data.draw(st.sampled_from(complete)), "teaches nothing")

    # Runners

    @rule(count=st.integers(1, 4))
    def lease(self, count: int) -> None:
        ledger, running = self.queue.ledger, self.queue.ledger.counts.of(Phase.RUNNING)
        queued = {group for group in self._groups() if group.phase is Phase.QUEUED}
        claims = self.queue.rollouts.lease(runner_id="r", max_rollouts=count, now_s=self.now_s)
        assert not claims or ledger.activity is not Activity.PAUSED
        assert ledger.counts.of(Phase.RUNNING) <= running or ledger.activity is Activity.RUNNING
        for claim in claims:
            assert claim.trajectory_id not in self.held, "an attempt was handed out twice"
            self.held[claim.trajectory_id] = claim
        self.check_order(claims)
        self.check_reach(queued)
        self.check_ahead(queued)
        self.check_admission(queued)

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
    @rule(
        data=st.data(),
        sealed=st.booleans(),
        reported=st.booleans(),
        permanent=st.booleans(),
        kind=st.sampled_from(FailureKind),
    )
    def end_rollout(
        self, data: st.DataObject, sealed: bool, reported: bool, permanent: bool, kind: FailureKind
    ) -> None:
        """A rollout ends: sealed or not, and its runner says so or dies."""
        trajectory_id = data.draw(st.sampled_from(sorted(self.held)))
        del self.held[trajectory_id]
        if sealed:
            self._seal(trajectory_id)
        if reported:
            self._report(trajectory_id, permanent=permanent and not sealed, kind=kind)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        trajectory_id = data.draw(st.sampled_from(sorted(self.held)))
        if not self.queue.rollouts.renew(trajectory_id, now_s=self.now_s):
            del self.held[trajectory_id]
        else:
            assert trajectory_id not in self.failed, "a claim came back from the dead"
            assert trajectory_id not in self.left_behind, "its shard takes no turns"

    @rule(seconds=st.sampled_from([0.5, 3.0, 11.0, 35.0]))
    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        for trajectory_id in self.queue.expire(self.now_s):
            if self._spec(trajectory_id).shard in self.queue.ledger.away:
                continue
            if self._is_sealed(trajectory_id):
                self._report(trajectory_id, permanent=False)
            else:
                # The runner may still be at it, and renew.
                self.queue.rollouts.lapse(trajectory_id, now_s=self.now_s)

    @invariant()
    def faults_tombstone_nothing(self) -> None:
        """What was given up was so for a failure of its own, or was lost too often."""
        failed = {parse_trajectory_id(each).task_id for each in self.own_failures}
        for group in self._groups():
            if group.reason.startswith("rollout ") and group.spec.task_id not in failed:
                assert "max_losses" in group.reason or "no end within" in group.reason

    def _seal(self, trajectory_id: str) -> None:
        name = parse_trajectory_id(trajectory_id)
        attempts = self.pool[name.task_id].attempts
        attempts[name.rollout_index, name.attempt] = AttemptState.SEALED

    def _is_sealed(self, trajectory_id: str) -> bool:
        name = parse_trajectory_id(trajectory_id)
        attempts = self.pool[name.task_id].attempts
        return attempts.get((name.rollout_index, name.attempt)) is AttemptState.SEALED

    def _report(
        self, trajectory_id: str, *, permanent: bool, kind: FailureKind = FailureKind.TASK
    ) -> None:
        """What the service does with a report: the pool has the last word."""
        if parse_trajectory_id(trajectory_id).task_id not in self.queue.ledger:
            return
        if self._is_sealed(trajectory_id):
            self.queue.rollouts.complete(trajectory_id, now_s=self.now_s)
        elif self.queue.rollouts.fail(
            trajectory_id, reason="died", permanent=permanent, kind=kind, now_s=self.now_s
        ):
            self.failed.add(trajectory_id)
            if permanent or kind is FailureKind.TASK:
                self.own_failures.add(trajectory_id)

    # Pool

    @rule(shards=st.sampled_from([(), (), (), (), (), ("s0",), ("s1",), SHARDS]))
    def lose_shards(self, shards: tuple[str, ...]) -> None:
        self.queue.set_away(frozenset(shards))

    @rule(data=st.data(), to_shard=st.sampled_from(SHARDS))
    def move_groups(self, data: st.DataObject, to_shard: str) -> None:
        """Groups without a lease and in no batch, in memory or not, are on another shard now."""
        (source,) = set(SHARDS) - {to_shard}
        ledger = self.queue.ledger
        movable = [
            task_id
            for task_id, durable in self.pool.items()
            if durable.spec.shard == source
            and (task_id not in ledger or _may_move(ledger.group(task_id)))
        ]
        if not movable:
            return
        chosen = data.draw(st.lists(st.sampled_from(movable), unique=True, max_size=3))
        moved: dict[str, tuple[bool, Phase] | None] = {}
        for task_id in chosen:
            durable = self.pool[task_id]
            durable.spec = replace(durable.spec, shard=to_shard)
            # What a group in memory is, the ledger knows itself.
            gone = None if task_id in ledger else self.gone[task_id]
            moved[task_id] = None if gone is None else (durable.spec.evaluation, gone.phase)
        ledger.relocate(moved, source=source, target=to_shard)
        self.left_behind |= {t for t in self.held if parse_trajectory_id(t).task_id in moved}

    @invariant()
    def forgotten_groups_are_counted_by_shard(self) -> None:
        """A shard that is declared lost takes these out of memory."""
        ledger = self.queue.ledger
        for shard in SHARDS:
            there = [
                one
                for task_id, one in self.pool.items()
                if task_id not in ledger and one.spec.shard == shard
            ]
            phases = ((one.spec.evaluation, self.gone[one.spec.task_id].phase) for one in there)
            assert ledger.forgotten_on(shard) == Counter(phases)

    @rule(keep=st.integers(0, 3))
    def store_final_states(self, keep: int) -> None:
        """The ledger catches up; what it has not stored a crash forgets."""
        for group in self.queue.ledger.settled()[keep:]:
            self.pool[group.spec.task_id].phase = group.phase

    @invariant()
    def forgetting_leaves_the_books_alone(self) -> None:
        """Memory is bounded: the oldest groups that are settled leave it, and their counts stay."""
        before = self.queue.ledger.totals()
        for group in self.queue.ledger.forget(most=self.most_settled):
            self.gone[group.spec.task_id] = group
        assert self.queue.ledger.totals() == before

    # Leaders

    @precondition(lambda self: self.held or self.batches)
    @rule()
    def crash(self) -> None:
        """The leader dies; the next one knows what was durable, and nothing else."""
        self.term += 1
        self.failed.clear()
        self.left_behind.clear()
        self.gone.clear()
        activity = self.queue.ledger.activity
        self.queue = GenerationQueue(self.settings, term=self.term, void_before=self.void_before)
        self.queue.set_activity(activity)
        in_order = sorted(self.pool.values(), key=lambda one: one.spec.index)
        left_out = [one for one in in_order if self._is_left_out(one)]
        pending = (
            one.spec.index for one in in_order if not one.phase.consumed and not one.spec.evaluation
        )
        self.queue.begin_at(min(pending, default=self.next_index[False]))
        for durable in in_order:
            if durable in left_out:
                self.gone[durable.spec.task_id] = durable.restored()
            else:
                self.queue.add_group(durable.restored(), now_s=self.now_s)
        for shard in SHARDS:
            there = [one for one in left_out if one.spec.shard == shard]
            self.queue.ledger.leave_out(
                shard,
                Counter((one.spec.evaluation, one.phase) for one in there),
                next_index=self.next_index[False],
                next_eval_index=self.next_index[True],
                last_step=max((one.step for one in there), default=0),
            )

    def _is_left_out(self, durable: Durable) -> bool:
        """Of what was trained on, the last steps are scanned; of what is over otherwise, all or
        nothing."""
        if durable.phase is Phase.TRAINED:
            return durable.step <= self.step - self.most_settled
        return durable.phase.consumed and self.most_settled == 0

    def teardown(self) -> None:
        """From wherever this went, the queue can be worked off to its end."""
        if not hasattr(self, "queue"):
            return
        self.queue.set_away(frozenset())
        self.queue.set_activity(Activity.RUNNING)
        for _ in range(20 * len(self.pool) + 20):
            if self._worked_off():
                return
            self.pass_time(35.0)
            for claim in self.queue.rollouts.lease(
                runner_id="last", max_rollouts=100, now_s=self.now_s
            ):
                self._seal(claim.trajectory_id)
                self._report(claim.trajectory_id, permanent=False)
            batch = self.queue.take_batch(trainer_id="last", max_groups=3, now_s=self.now_s)
            if batch is not None:
                self.batches["last"] = (batch.batch_id, batch.task_ids)
                self._commit_again("last", self.step + 1)
        raise AssertionError(f"stuck: {self.queue.ledger.totals()}")

    def _worked_off(self) -> bool:
        status = self.queue.ledger.totals()
        return status.pending == 0 and status.eval_pending == 0

    def _spec(self, trajectory_id: str) -> GroupSpec:
        return self.pool[parse_trajectory_id(trajectory_id).task_id].spec


FUZZ = settings.get_current_profile_name() == "fuzz"
GenerationQueueMachine.TestCase.settings = settings(
    max_examples=750 if FUZZ else 95,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestGenerationQueue = GenerationQueueMachine.TestCase
