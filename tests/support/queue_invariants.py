"""What must hold of the generation queue after every operation, whatever it was."""

from __future__ import annotations

from hypothesis.stateful import RuleBasedStateMachine, invariant

from forge.core.admission import Admission, QueueSettings
from forge.core.generation import GenerationQueue
from forge.core.groups import Group, Phase, RolloutPhase
from forge.core.rollouts import RolloutClaim
from forge.core.trajectory import TaskId
from forge.core.window import Window
from tests.support.durable_group import Durable


class QueueInvariants(RuleBasedStateMachine):
    """A machine around a real queue, with the simplest possible model of it."""

    queue: GenerationQueue
    settings: QueueSettings
    pool: dict[TaskId, Durable]
    trained: dict[TaskId, int]
    next_index: dict[bool, int]
    announced: tuple[Window, int]
    """The window and its edge, as they were."""

    @invariant()
    def books_balance(self) -> None:
        status = self.queue.books.status()
        training = [one for one in self.pool.values() if not one.spec.evaluation]
        assert status.accepted == len(training)
        assert status.accepted == status.trained + status.tombstoned + status.pending
        assert status.trained == len(self.trained)

    @invariant()
    def head_is_the_oldest_unconsumed_group(self) -> None:
        assert self.queue.books.window.head == self._head()

    @invariant()
    def window_counts_what_is_in_it(self) -> None:
        status = self.queue.books.status()
        complete = [
            group.spec.index
            for group in self._groups()
            if group.phase is Phase.COMPLETE and not group.spec.evaluation
        ]
        edge = self.queue.books.window.edge
        inside = [index for index in complete if index < edge]
        assert status.complete_in_window == len(inside)
        assert status.complete_outside_window == len(complete) - len(inside)

    @invariant()
    def announced_window_is_never_taken_back(self) -> None:
        """Only a rewind or another leader may; and it is no wider than W, or what was announced."""
        window, (earlier, edge) = self.queue.books.window, self.announced
        known = edge if window is earlier else 0
        assert window.edge >= known
        assert window.edge <= max(known, window.head + window.size)
        self.announced = window, window.edge

    @invariant()
    def at_most_n_groups_run(self) -> None:
        running = [group for group in self._groups() if group.phase is Phase.RUNNING]
        assert len(running) == self.queue.books.status().running <= self.settings.concurrency
        # A runner may go on with what an earlier leader gave it, whatever the limit.
        if not self.queue.rollouts.adopted:
            for domain, limit in self.settings.domain_limits.items():
                assert sum(group.spec.domain == domain for group in running) <= limit
        claims = sum(
            rollout.phase is RolloutPhase.LEASED for group in running for rollout in group.rollouts
        )
        assert claims == len(self.queue.rollouts)

    def check_reach(self, queued: set[Group]) -> None:
        """No group is passed by one that is W or N behind it, whatever the priorities."""
        reach = min(self.queue.books.window.size, self.settings.concurrency)
        if self.settings.domain_limits or self.queue.books.away:
            return
        training = [group for group in queued if not group.spec.evaluation]
        left = [group.spec.index for group in training if group.phase is Phase.QUEUED]
        for group in training:
            if group.phase is not Phase.QUEUED and left:
                assert group.spec.index - min(left) < reach

    def check_ahead(self, queued: set[Group]) -> None:
        """The adaptive mode starts no more than can be trained on in time, but for those near the
        head, which others may have overtaken."""
        books, adaptive = self.queue.books, self.queue.books.adaptive
        started = [g for g in queued if g.phase is not Phase.QUEUED and not g.spec.evaluation]
        if adaptive is None or not started:
            return
        assert books.running_training() <= adaptive.running_limit
        edge = books.window.head + adaptive.running_limit
        near = sum(group.spec.index < edge for group in started)
        if near < len(started):
            assert books.untrained() - near <= adaptive.most_open, "it ran ahead"

    def check_admission(self, queued: set[Group]) -> None:
        """`ahead` starts nothing M places beyond the head; `window` nothing beyond N groups
        running or complete, but for those near the head. Of what was queued before a lease."""
        books, settings = self.queue.books, self.settings
        started = [g for g in queued if g.phase is not Phase.QUEUED and not g.spec.evaluation]
        if books.adaptive is not None or not started:
            return
        head, n = books.window.head, settings.concurrency
        if settings.admission is Admission.AHEAD:
            assert max(group.place for group in started) < head + (settings.ahead or n)
        if settings.admission is Admission.WINDOW:
            edge = head + min(books.window.size, n)
            near = sum(group.spec.index < edge for group in started)
            if near < len(started):
                assert books.running_training() + books.complete() - near <= n

    def check_order(self, claims: tuple[RolloutClaim, ...]) -> None:
        """Evaluation first, then by index; nothing that could go out was passed over."""
        keys = [self._key(claim) for claim in claims]
        assert keys == sorted(keys)
        if keys:
            left = [
                self._place(group, index)
                for group in self._groups()
                if group.phase is Phase.RUNNING and group.spec.shard not in self.queue.books.away
                for index in range(group.spec.size)
                if group.rollout(index).phase is RolloutPhase.READY
            ]
            assert not left or keys[-1] < min(left)

    def _key(self, claim: RolloutClaim) -> tuple[bool, float, int, int]:
        return self._place(self.queue.books.group(claim.task_id), claim.rollout_index)

    def _place(self, group: Group, rollout_index: int) -> tuple[bool, float, int, int]:
        return (not group.spec.evaluation, group.place, group.spec.index, rollout_index)

    def _groups(self) -> list[Group]:
        return [self.queue.books.group(task_id) for task_id in self.pool]

    def _head(self) -> int:
        waiting = [
            group.spec.index
            for group in self._groups()
            if not group.spec.evaluation and not group.phase.consumed
        ]
        return min(waiting, default=self.next_index[False])
