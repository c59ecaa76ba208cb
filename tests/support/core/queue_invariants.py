"""Invariants of the generation queue after every operation."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis.stateful import RuleBasedStateMachine, invariant

from forge.core.queue.admission import GenerationLimit, Mode, QueueSettings
from forge.core.queue.generation_queue import GenerationQueue
from forge.core.queue.group_counts import STARTED
from forge.core.queue.groups import Group, Phase, RolloutPhase
from forge.core.queue.rollouts import RolloutClaim
from forge.core.queue.selection.adaptive import Adaptive
from forge.core.queue.window.window import Window
from forge.core.trajectory import TaskId
from tests.support.core.durable_group import Durable


@dataclass(frozen=True)
class Look:
    """What a trainer could see before it asked."""

    edge: int
    taken: set[int]
    """Indices in a batch, or assigned to one."""
    consumed: set[int]
    complete: set[int]


class QueueInvariants(RuleBasedStateMachine):
    """A machine around a real queue, with the simplest possible model of it."""

    queue: GenerationQueue
    settings: QueueSettings
    pool: dict[TaskId, Durable]
    trained: dict[TaskId, int]
    next_index: dict[bool, int]
    announced: tuple[Window, int]
    """The window and its edge, as they were."""
    gone: dict[TaskId, Group]
    """What the queue has let go of, as it was then."""

    @invariant()
    def books_balance(self) -> None:
        status = self.queue.ledger.totals()
        training = [one for one in self.pool.values() if not one.spec.evaluation]
        assert status.accepted == len(training)
        assert status.accepted == status.trained + status.tombstoned + status.pending
        assert status.trained == len(self.trained)

    @invariant()
    def only_what_is_settled_is_forgotten(self) -> None:
        """What is held and what is not are all groups there are."""
        ledger = self.queue.ledger
        forgotten = [task_id for task_id in self.pool if task_id not in ledger]
        assert all(self.gone[task_id].phase.consumed for task_id in forgotten)
        assert len(ledger) + len(forgotten) == len(self.pool)
        assert {self.pool[task_id].spec.shard for task_id in forgotten} <= ledger.forgotten_shards

    @invariant()
    def head_is_the_oldest_group_nobody_took(self) -> None:
        """Below it, all is consumed, in a batch, or assigned to the next one; and no more than
        `most_taken` is not consumed."""
        window = self.queue.window
        below = [g for g in self._training() if g.spec.index < window.head]
        untrained = [group for group in below if not group.phase.consumed]
        assert all(map(self._is_taken, untrained))
        adaptive = isinstance(self.queue.selection, Adaptive)
        assert adaptive or len(untrained) <= window.most_taken
        # What the adaptive mode passed while W was larger counts on.
        if len(untrained) < window.most_taken:
            assert window.head == self._head()

    @invariant()
    def assigned_groups_are_complete_and_inside(self) -> None:
        window = self.queue.window
        assigned = [group for group in self._training() if self._is_assigned(group)]
        assert len(assigned) == window.assigned
        for group in assigned:
            assert group.phase is Phase.COMPLETE
            assert group.spec.index < window.edge

    @invariant()
    def window_counts_what_is_in_it(self) -> None:
        status = self.queue.ledger.totals()
        complete = [
            group.spec.index
            for group in self._groups()
            if group.phase is Phase.COMPLETE and not group.spec.evaluation
        ]
        edge = self.queue.window.edge
        inside = [index for index in complete if index < edge]
        assert status.complete_in_window == len(inside)
        assert status.complete_outside_window == len(complete) - len(inside)

    @invariant()
    def announced_window_is_never_taken_back(self) -> None:
        """Only a rewind or another leader may; and it is no wider than W, or what was announced."""
        window, (earlier, edge) = self.queue.window, self.announced
        known = edge if window is earlier else 0
        assert window.edge >= known
        assert window.edge <= max(known, window.head + window.size)
        self.announced = window, window.edge

    @invariant()
    def at_most_n_groups_run(self) -> None:
        running = [group for group in self._groups() if group.phase is Phase.RUNNING]
        assert (
            len(running) == self.queue.ledger.totals().running_groups <= self.settings.concurrency
        )
        # A runner may go on with what an earlier leader gave it, whatever the limit.
        if not self.queue.rollouts.adopted:
            for domain, limit in self.settings.domain_limits.items():
                assert sum(group.spec.domain == domain for group in running) <= limit
        claims = sum(
            rollout.phase is RolloutPhase.LEASED for group in running for rollout in group.rollouts
        )
        assert claims == len(self.queue.rollouts)

    def look(self) -> Look:
        training = self._training()
        return Look(
            edge=self.queue.window.edge,
            taken={group.spec.index for group in training if self._is_taken(group)},
            consumed={group.spec.index for group in training if group.phase.consumed},
            complete={g.spec.index for g in training if g.phase is Phase.COMPLETE},
        )

    def check_assignment(self, before: Look) -> None:
        """Each group that was taken was complete, and inside the window as it stood once those
        with lower indices were taken; where batches are chosen whole, as it stood before."""
        after = self.look()
        whole = self.settings.mode in (Mode.FIFO, Mode.ADAPTIVE)
        taken = set(before.taken)
        for index in sorted(after.taken - before.taken):
            assert index in before.complete
            edge = before.edge if whole else max(before.edge, self._reach(taken, before.consumed))
            assert index < edge, "at or beyond H+W"
            taken.add(index)

    def _reach(self, taken: set[int], consumed: set[int]) -> int:
        """H+W, by the rule alone."""
        window = self.queue.window
        held = {group.spec.index for group in self._training()}
        head = passed = 0
        while head < self.next_index[False]:
            if head in held and head not in consumed:
                if head not in taken or passed == window.most_taken:
                    break
                passed += 1
            head += 1
        return head + window.size

    def check_reach(self, queued: set[Group]) -> None:
        """No group is passed by one that is W or N behind it, whatever the priorities."""
        reach = min(self.queue.window.size, self.settings.concurrency)
        if self.settings.domain_limits or self.queue.ledger.away:
            return
        training = [group for group in queued if not group.spec.evaluation]
        left = [group.spec.index for group in training if group.phase is Phase.QUEUED]
        for group in training:
            if group.phase is not Phase.QUEUED and left:
                assert group.spec.index - min(left) < reach

    def check_ahead(self, queued: set[Group]) -> None:
        """The adaptive mode starts no more than can be trained on in time, but for those near the
        head, which others may have overtaken."""
        ledger, adaptive = self.queue.ledger, self.queue.selection
        started = [g for g in queued if g.phase is not Phase.QUEUED and not g.spec.evaluation]
        if not isinstance(adaptive, Adaptive) or not started:
            return
        assert ledger.counts.of(Phase.RUNNING) <= adaptive.running_limit
        edge = ledger.window.head + adaptive.running_limit
        near = sum(group.spec.index < edge for group in started)
        if near < len(started):
            assert sum(map(ledger.counts.of, STARTED)) - near <= adaptive.most_open, "it ran ahead"

    def check_admission(self, queued: set[Group]) -> None:
        """`ahead` starts nothing M places beyond the head; `window` nothing beyond N groups
        running or complete, but for those near the head. Of what was queued before a lease."""
        ledger, settings = self.queue.ledger, self.settings
        started = [g for g in queued if g.phase is not Phase.QUEUED and not g.spec.evaluation]
        if isinstance(self.queue.selection, Adaptive) or not started:
            return
        head, n = ledger.window.head, settings.concurrency
        if settings.admission is GenerationLimit.AHEAD:
            assert max(group.place for group in started) < head + (settings.ahead or n)
        if settings.admission is GenerationLimit.WINDOW:
            edge = head + min(ledger.window.size, n)
            near = sum(group.spec.index < edge for group in started)
            if near < len(started):
                unfetched = ledger.counts.of(Phase.COMPLETE) - ledger.window.assigned
                assert ledger.counts.of(Phase.RUNNING) + unfetched - near <= n

    def check_order(self, claims: tuple[RolloutClaim, ...]) -> None:
        """Evaluation first, then by index; nothing that could go out was passed over."""
        keys = [self._key(claim) for claim in claims]
        assert keys == sorted(keys)
        if keys:
            left = [
                self._place(group, index)
                for group in self._groups()
                if group.phase is Phase.RUNNING and group.spec.shard not in self.queue.ledger.away
                for index in range(group.spec.size)
                if group.rollout(index).phase is RolloutPhase.READY
            ]
            assert not left or keys[-1] < min(left)

    def _key(self, claim: RolloutClaim) -> tuple[bool, float, int, int]:
        return self._place(self.queue.ledger.group(claim.task_id), claim.rollout_index)

    def _place(self, group: Group, rollout_index: int) -> tuple[bool, float, int, int]:
        return (not group.spec.evaluation, group.place, group.spec.index, rollout_index)

    def _groups(self) -> list[Group]:
        return [self._group(task_id) for task_id in self.pool]

    def _group(self, task_id: str) -> Group:
        """As the queue has it, or had it when it let go of it."""
        ledger = self.queue.ledger
        return ledger.group(task_id) if task_id in ledger else self.gone[TaskId(task_id)]

    def _training(self) -> list[Group]:
        return [group for group in self._groups() if not group.spec.evaluation]

    def _is_taken(self, group: Group) -> bool:
        return group.phase is Phase.BATCHED or self._is_assigned(group)

    def _is_assigned(self, group: Group) -> bool:
        return group.spec.index in self.queue.window._filling.indices

    def _head(self) -> int:
        waiting = [
            group.spec.index
            for group in self._training()
            if not (group.phase.consumed or self._is_taken(group))
        ]
        return min(waiting, default=self.next_index[False])
