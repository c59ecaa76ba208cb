"""What trainers do with the batches of a generation queue, and leaders that are deposed while
they store it. The machine that has these rules brings operators, runners and crashes."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from forge.core.errors import FailedPrecondition, NotFound, StaleFence
from forge.core.queue.activity import Activity
from forge.core.queue.batches import Batch
from forge.core.queue.groups import Phase
from forge.core.queue.rollouts import RolloutClaim
from forge.core.trajectory import TaskId
from tests.support.core.queue_invariants import QueueInvariants

TRAINERS = ("t0", "t1")


class QueueTrainers(QueueInvariants):
    """Rules of the training side; `crash` is the machine's."""

    now_s: float
    term: int
    """Fence of the current leader, which the pool checks."""
    held: dict[str, RolloutClaim]
    """What runners hold, or believe to hold."""
    batches: dict[str, tuple[str, tuple[TaskId, ...]]]
    """Per trainer: the batch it works on, or believes to."""
    step: int
    """Of the surviving lineage, whose groups are in `trained`."""
    failed: set[str]
    """Attempts that this leader counted as failed."""
    revoked: set[str]
    """Batches that a rewind took back."""
    void_before: tuple[int, int]
    """What of that is durable."""
    late_writes: list[tuple[int, str, int, tuple[TaskId, ...]]]
    """Fence, batch, step and groups of commits that deposed leaders have yet to store."""

    done: dict[str, tuple[int, tuple[TaskId, ...]]]
    """Step and groups of batches that were committed and count."""

    def crash(self) -> None:
        raise NotImplementedError

    def pass_time(self, seconds: float) -> None:
        raise NotImplementedError

    def work(self, count: int) -> None:
        raise NotImplementedError

    @rule(trainer=st.sampled_from(TRAINERS), size=st.integers(1, 5), worked=st.booleans())
    def wait_for_batch(self, trainer: str, size: int, worked: bool) -> None:
        """Long enough for a short one; as a rule, runners have completed something."""
        if worked:
            self.work(8)
        self.pass_time(3.0)
        self.take(trainer, size)

    @rule(trainer=st.sampled_from(TRAINERS), size=st.integers(1, 5))
    def take(self, trainer: str, size: int) -> None:
        before = self.look()
        batch = self.queue.take_batch(trainer_id=trainer, max_groups=size, now_s=self.now_s)
        self.check_assignment(before)
        if batch is None:
            return
        held = self.batches.get(trainer)
        if held is None or held[0] != batch.batch_id:
            assert self.queue.ledger.activity is not Activity.PAUSED
            self._check_batch(batch, size)
        self.batches[trainer] = (batch.batch_id, batch.task_ids)

    def _check_batch(self, batch: Batch, size: int) -> None:
        away = self.queue.ledger.away
        assert 0 < len(batch.task_ids) <= size
        assert len(set(batch.task_ids)) == len(batch.task_ids)
        for task_id in batch.task_ids:
            durable = self.pool[task_id]
            assert not durable.spec.evaluation
            assert durable.spec.shard not in away
            assert task_id not in self.trained
            sealed = {key[0] for key, state in durable.attempts.items() if state.name == "SEALED"}
            assert sealed == set(range(durable.spec.size)), "a partial group was handed out"
            counted = self.queue.ledger.group(task_id).sealed_ids()
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
            stored = self._prepare(batch_id, step, task_ids if named else ())
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
        self.done[batch_id] = (step, task_ids)
        self._commit_once_more(batch_id)

    @precondition(lambda self: self.done)
    @rule(data=st.data())
    def commit_late(self, data: st.DataObject) -> None:
        """A trainer that heard no answer asks again, however late."""
        self._commit_once_more(data.draw(st.sampled_from(sorted(self.done))))

    def _commit_once_more(self, batch_id: str) -> None:
        step, task_ids = self.done[batch_id]
        for named in (task_ids, ()):
            assert self._prepare(batch_id, step, named) == (), "nothing is left to do"
            with pytest.raises(FailedPrecondition):
                self._prepare(batch_id, step + 1, named)

    def _prepare(
        self, batch_id: str, step: int, task_ids: tuple[TaskId, ...]
    ) -> tuple[TaskId, ...]:
        """With what the pool says of groups that are not held."""
        ledger, batches = self.queue.ledger, self.queue.batches
        unheld = {task_id for task_id in task_ids if task_id not in ledger}
        trained = [
            one.step
            for one in self.pool.values()
            if one.phase is Phase.TRAINED and one.batch_id == batch_id
        ]
        looked_up = batches.get(batch_id) is None and (unheld or not task_ids)
        return batches.prepare_commit(
            batch_id,
            step=step,
            task_ids=task_ids,
            now_s=self.now_s,
            committed_by=max(trained, default=None) if looked_up else None,
            settled=unheld if looked_up else (),
        )

    def _commit_again(self, trainer: str, step: int) -> None:
        batch_id, task_ids = self.batches.pop(trainer)
        left = self._prepare(batch_id, step, task_ids)
        self.step = step
        self._store_trained(left, batch_id, step)
        self.queue.batches.commit(batch_id, step=step)
        assert all(self.trained[task_id] == step for task_id in task_ids)

    def _store_trained(
        self, task_ids: tuple[TaskId, ...], batch_id: str, step: int, *, fence: int | None = None
    ) -> None:
        """The pool's part. Raises StaleFence for the fence of a leader that was deposed."""
        if fence is not None and fence < self.term:
            raise StaleFence(f"fence {fence} is below {self.term}")
        for task_id in task_ids:
            assert task_id not in self.trained, "trained twice in one lineage"
            self.trained[task_id] = step
            durable = self.pool[task_id]
            durable.phase, durable.batch_id, durable.step = Phase.TRAINED, batch_id, step

    @precondition(lambda self: self.batches)
    @rule(data=st.data())
    def renew_batch(self, data: st.DataObject) -> None:
        """A batch that is renewed is held, every group of it."""
        batch_id, task_ids = self.batches[data.draw(st.sampled_from(sorted(self.batches)))]
        try:
            self.queue.batches.renew(batch_id, now_s=self.now_s)
        except NotFound:
            assert self.queue.batches.get(batch_id) is None
        else:
            self._check_held(batch_id, task_ids)

    @precondition(lambda self: self.batches)
    @rule(data=st.data())
    def adopt(self, data: st.DataObject) -> None:
        """A trainer names the batch it works on: held again, unless it was taken back for good or
        its groups went elsewhere."""
        batch_id, task_ids = self.batches[data.draw(st.sampled_from(sorted(self.batches)))]
        groups = [self._group(task_id) for task_id in task_ids]
        free = all(group.phase is Phase.COMPLETE for group in groups)
        self.queue.batches.adopt(batch_id, task_ids, now_s=self.now_s)
        if self.queue.batches.get(batch_id):
            self._check_held(batch_id, task_ids)
        else:
            assert not free or batch_id in self.revoked, "nobody else has it"

    def _check_held(self, batch_id: str, task_ids: tuple[TaskId, ...]) -> None:
        assert batch_id not in self.revoked, "what a rewind took back is held again"
        for task_id in task_ids:
            group = self.queue.ledger.group(task_id)
            assert (group.phase, group.batch_id) == (Phase.BATCHED, batch_id)

    @precondition(lambda self: self.batches)
    @rule(data=st.data(), wakes=st.booleans())
    def depose(self, data: st.DataObject, wakes: bool) -> None:
        """The leader freezes before it has stored a commit, and another takes over."""
        batch_id, task_ids = self.batches[data.draw(st.sampled_from(sorted(self.batches)))]
        try:
            stored = self._prepare(batch_id, self.step + 1, task_ids)
        except NotFound:
            return
        self.late_writes.append((self.term, batch_id, self.step + 1, stored))
        self.crash()
        if wakes:
            self.wake()

    @precondition(lambda self: self.late_writes)
    @rule()
    def wake(self) -> None:
        """It goes on where it was: the pool refuses its fence, and nothing is trained by it."""
        fence, batch_id, step, task_ids = self.late_writes.pop()
        with pytest.raises(StaleFence):
            self._store_trained(task_ids, batch_id, step, fence=fence)

    @precondition(lambda self: self.batches)
    @rule(data=st.data())
    def release_part(self, data: st.DataObject) -> None:
        """A trainer cannot read some groups of a batch: they are given up, the rest goes back."""
        batch_id, task_ids = self.batches.pop(data.draw(st.sampled_from(sorted(self.batches))))
        lost = data.draw(st.sets(st.sampled_from(task_ids)))
        held = self.queue.batches.prepare_release(batch_id, now_s=self.now_s)
        for task_id in lost.intersection(held):
            self.pool[task_id].phase = Phase.TOMBSTONED
        self.queue.batches.release(batch_id, dict.fromkeys(sorted(lost), "cannot be read"))
        for task_id in held:
            phase = self.queue.ledger.group(task_id).phase
            assert phase is (Phase.TOMBSTONED if task_id in lost else Phase.COMPLETE)

    @precondition(lambda self: self.batches)
    @rule(data=st.data(), bad=st.booleans())
    def release(self, data: st.DataObject, bad: bool) -> None:
        trainer = data.draw(st.sampled_from(sorted(self.batches)))
        batch_id, _ = self.batches.pop(trainer)
        reasons: dict[str, str] = {}
        for task_id in self.queue.batches.prepare_release(batch_id, now_s=self.now_s):
            if bad:
                self.pool[task_id].phase = Phase.TOMBSTONED
                reasons[task_id] = "cannot be trained on"
        self.queue.batches.release(batch_id, reasons)

    def _recall(self, step: int) -> None:
        """What is to be taken back and was let go of, as the pool has it."""
        ledger = self.queue.ledger
        later = [task for task, trained in self.trained.items() if trained > step]
        shards = ledger.shards_to_recall(step)
        found = [self.pool[task_id] for task_id in later]
        ledger.recall([one.restored() for one in found if one.spec.shard in shards], after=step)
        assert all(task_id in ledger for task_id in later)

    @precondition(lambda self: self.step > 0)
    @rule(back=st.integers(1, 3))
    def rewind(self, back: int) -> None:
        """A trainer died and restored the checkpoint of an earlier step."""
        step = max(0, self.step - back)
        self.revoked |= {batch_id for batch_id, _ in self.batches.values()}
        self._recall(step)
        self.done = {batch: each for batch, each in self.done.items() if each[0] <= step}
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
        self.announced = self.queue.window, self.queue.window.edge
        self.step = step
        for batch_id, task_ids in self.batches.values():
            self.queue.batches.adopt(batch_id, task_ids, now_s=self.now_s)
        assert all(group.phase is not Phase.BATCHED for group in self._groups())
