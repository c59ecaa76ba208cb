"""The ledger of the generation queue: every group and its phase.

    accepted = trained + tombstoned + pending

Owns each change of phase, so that counts, window, order and selection agree. A settled group stays
in memory for a while; after that the counts alone have it. `forge.core.queue.rollouts` (sampling)
and `forge.core.queue.batches` (training) decide when a group changes phase.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from forge.core.errors import InvalidArgument, NotFound
from forge.core.queue.activity import Activity
from forge.core.queue.dispatch.dispatch import Dispatch
from forge.core.queue.group_counts import PENDING, GroupCounts
from forge.core.queue.groups import Group, Phase
from forge.core.queue.selection.selection import Selection
from forge.core.queue.window.window import Window
from forge.core.trajectory import TaskId


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTotals:
    """Training groups by state."""

    accepted: int
    trained: int
    tombstoned: int
    pending: int
    queued: int
    running_groups: int
    """Groups of both purposes, which count against N."""
    complete_in_window: int
    complete_outside_window: int
    eval_pending: int


class GroupLedger:
    """All groups of one leader's term."""

    def __init__(
        self,
        window: Window,
        selection: Selection,
        *,
        domain_limits: Mapping[str, int],
    ) -> None:
        """`domain_limits`: most running groups of a domain, of both purposes."""
        self.window = window
        self.selection = selection
        self.counts = GroupCounts()
        self._domain_limits = dict(domain_limits)
        self.dispatch = Dispatch()
        self._reach = min(window.size, selection.running_limit) - 1
        """Most older groups that a priority may start before: such a group is near the head, where
        complete groups beyond the window cannot hold it back."""
        self._running_of: Counter[str] = Counter()
        """Running groups of domains with a limit."""
        self.away: frozenset[str] = frozenset()
        """Unreachable pool shards: their groups are neither leased nor waited for."""
        self.activity = Activity.RUNNING
        self.next_eval_index = 0
        """One above the highest index of an evaluation group."""
        self.added_s = 0.0
        """Time of the last `add`."""
        self._groups: dict[TaskId, Group] = {}
        self._trained: defaultdict[int, list[Group]] = defaultdict(list)
        """Trained groups in memory, by optimizer step."""
        self._trained_held = 0
        """Number of these groups."""
        self._settled: list[Group] = []
        self._over: deque[Group] = deque()
        """Tombstoned and evaluated groups in memory that `settled` returned."""
        self._forgotten_steps: dict[str, int] = {}
        """By pool shard with settled groups that are not in memory: no later step trained one."""
        self._forgotten: defaultdict[str, Counter[tuple[bool, Phase]]] = defaultdict(Counter)
        """By pool shard: these groups by (evaluation, phase)."""
        self._kept_after = math.inf
        """Groups of later steps stay in memory, for a prepared rewind."""

    def __contains__(self, task_id: str) -> bool:
        """Whether the group is in memory."""
        return task_id in self._groups

    def group(self, task_id: str) -> Group:
        """A group in memory. Raises NotFound."""
        try:
            return self._groups[TaskId(task_id)]
        except KeyError:
            raise NotFound(f"task_id {task_id!r} is not in the queue") from None

    def of_domain(self, domain: str) -> list[Group]:
        """Groups in memory of a domain."""
        return [group for group in self._groups.values() if group.spec.domain == domain]

    @property
    def forgotten_shards(self) -> frozenset[str]:
        """Pool shards with settled groups that are not in memory."""
        return frozenset(self._forgotten_steps)

    def __len__(self) -> int:
        """Number of groups in memory."""
        return len(self._groups)

    def begin_at(self, head: int) -> None:
        """Every training group with a lower index is settled. Precedes every `add`."""
        self.window.begin_at(head)
        self.selection.begin_at(head)

    def leave_out(
        self,
        shard: str,
        counts: Mapping[tuple[bool, Phase], int],
        *,
        next_index: int,
        next_eval_index: int,
        last_step: int,
    ) -> None:
        """Count settled groups of a pool shard, by (evaluation, phase), that are not added; all its
        other groups are. `next_index` is above every index on the shard; no later step than
        `last_step` trained one of the counted groups."""
        self.counts.add_counted(counts)
        self.window.reserve(next_index)
        self.next_eval_index = max(self.next_eval_index, next_eval_index)
        if any(counts.values()):
            self._note_forgotten(shard, last_step)
            self._forgotten[shard].update(counts)

    def add_group(self, group: Group, *, now_s: float) -> None:
        """Accept a group, new or of an earlier term. Raises InvalidArgument."""
        spec = group.spec
        if spec.task_id in self:
            raise InvalidArgument(f"task_id {spec.task_id!r} was submitted before")
        assert group.phase is Phase.QUEUED or not group.phase.open
        self._place(group)
        self._groups[spec.task_id] = group
        self.counts.add((group,))
        self.added_s = now_s
        self._keep_settled((group,))
        if spec.evaluation:
            self.next_eval_index = max(self.next_eval_index, spec.index + 1)
        else:
            self.window.add(group)
            self.selection.restored((group,))
        if not self.close_if_sealed(group, now_s) and group.phase is Phase.QUEUED:
            self.dispatch.list_group(group)

    def are_new(self, task_ids: Sequence[TaskId]) -> bool:
        """Whether the ids are distinct and no group is in memory."""
        return len(set(task_ids)) == len(task_ids) and not any(
            task_id in self for task_id in task_ids
        )

    def add_at_rest(
        self, task_ids: Sequence[TaskId], groups: Sequence[Group], *, now_s: float
    ) -> None:
        """`add` for many new groups of an earlier term, in queue order, each settled or without
        attempts; about five times as fast."""
        self._groups.update(zip(task_ids, groups, strict=True))
        self.counts.add(groups)
        self.added_s = now_s
        self._keep_settled(groups)
        for group in groups:
            self._place(group)
            if group.phase is Phase.QUEUED:
                self.dispatch.list_group(group)
        training = [group for group in groups if not group.spec.evaluation]
        self.window.add_in_order(training)
        if len(training) < len(groups):
            last = max(group.spec.index for group in groups if group.spec.evaluation)
            self.next_eval_index = max(self.next_eval_index, last + 1)
        self.selection.restored(training)

    def _place(self, group: Group) -> None:
        """Set its place in the order of starts."""
        spec = group.spec
        if spec.priority and not spec.evaluation and (gained := min(spec.priority, self._reach)):
            # Before the oldest group that it passes, and after the next older one.
            group.place = spec.index - gained - 0.5
        else:
            group.place = spec.index

    def move(self, group: Group, phase: Phase) -> None:
        """One group changes phase."""
        before, group.phase = group.phase, phase
        spec = group.spec
        self.counts.moved(spec, before, phase)
        if change := (phase is Phase.RUNNING) - (before is Phase.RUNNING):
            self._limit_domain(spec.domain, change)
        if not spec.evaluation:
            self.window.moved(group, before)

    def move_batch(self, groups: Sequence[Group], before: Phase, phase: Phase) -> None:
        """Closed training groups change phase together."""
        for group in groups:
            group.phase = phase
        self.counts.moved_together(len(groups), before, phase)
        self.window.moved_together(groups, before)
        if phase is Phase.COMPLETE:
            self.selection.came_back(groups)
        elif phase is Phase.BATCHED:
            self.selection.taken(groups)

    def start(self, group: Group, now_s: float) -> None:
        """Records that the first rollout of the group is leased."""
        self.move(group, Phase.RUNNING)
        if not group.spec.evaluation:
            self.selection.started(group, now_s)

    def close_if_sealed(self, group: Group, now_s: float) -> bool:
        """Complete or evaluate a group whose rollouts are all sealed; whether it was."""
        if not group.phase.open or group.sealed < group.spec.size:
            return False
        group.close()
        self.move(group, Phase.EVALUATED if group.spec.evaluation else Phase.COMPLETE)
        if group.spec.evaluation:
            self._settled.append(group)
        else:
            self.selection.completed(group, now_s)
        return True

    def tombstone(self, group: Group, reason: str) -> None:
        """Drop a group; its leases have ended."""
        if group.phase.open:
            group.close()
        group.reason = reason
        self.move(group, Phase.TOMBSTONED)
        self._settled.append(group)
        if not group.spec.evaluation:
            self.selection.gave_up(group)

    def train(self, groups: Sequence[Group], *, step: int) -> None:
        """Records that the groups of a batch were trained on."""
        for group in groups:
            group.step = step
        self._trained[step] += groups
        self._trained_held += len(groups)
        # A prepared rewind has ended, or its caller gave up.
        self._kept_after = math.inf
        self.move_batch(groups, Phase.BATCHED, Phase.TRAINED)
        queued = self.counts.of(Phase.QUEUED)
        self.selection.trained(groups, head=self.window.head, queued=queued)

    def trained_after(self, step: int) -> list[Group]:
        """Groups in memory that later steps trained on."""
        return [g for known, groups in self._trained.items() if known > step for g in groups]

    def rewind(self, step: int) -> list[Group]:
        """Groups trained after `step` are complete again."""
        undone = self.trained_after(step)
        for group in undone:
            group.phase, group.batch_id, group.step = Phase.COMPLETE, "", 0
        self.counts.moved_together(len(undone), Phase.TRAINED, Phase.COMPLETE)
        for later in [known for known in self._trained if known > step]:
            del self._trained[later]
        self._trained_held -= len(undone)
        self._kept_after = math.inf
        self.window.rebuild(undone)
        self.selection.came_back(undone)
        return undone

    def settled(self) -> tuple[Group, ...]:
        """Groups tombstoned or evaluated since the last call, to be stored."""
        settled, self._settled = tuple(self._settled), []
        self._over += settled
        return settled

    def settled_training(self) -> Iterator[Group]:
        """Trained and tombstoned training groups in memory."""
        groups = chain(*self._trained.values(), self._over, self._settled)
        return (group for group in groups if not group.spec.evaluation)

    def tombstoned(self) -> list[Group]:
        """Tombstoned training groups in memory, the oldest first."""
        return [g for g in self.settled_training() if g.phase is Phase.TOMBSTONED]

    def _keep_settled(self, groups: Iterable[Group]) -> None:
        """Record groups that an earlier term settled, for `forget`."""
        for group in groups:
            if group.phase is Phase.TRAINED:
                self._trained[group.step].append(group)
                self._trained_held += 1
            elif group.phase.consumed:
                self._over.append(group)

    def forget(self, *, most: float) -> list[Group]:
        """Remove the oldest settled groups from memory: about `most` trained ones stay, and `most`
        others. Returns the removed groups; all counts stay.

        Groups of a step are removed together, and the last step stays. A rewind that needs removed
        groups restores them first, see `shards_to_recall`.
        """
        gone: list[Group] = []
        while len(self._over) > most:
            gone.append(self._over.popleft())
        while self._trained_held > most and len(self._trained) > 1:
            step = next(iter(self._trained))
            if step > self._kept_after:
                break
            trained = self._trained.pop(step)
            self._trained_held -= len(trained)
            gone += trained
        for group in gone:
            del self._groups[group.spec.task_id]
            self._note_forgotten(group.spec.shard, group.step)
            self._forgotten[group.spec.shard][group.spec.evaluation, group.phase] += 1
        return gone

    def _note_forgotten(self, shard: str, step: int) -> None:
        self._forgotten_steps[shard] = max(self._forgotten_steps.get(shard, 0), step)

    def shards_to_recall(self, step: int) -> frozenset[str]:
        """Pool shards with removed groups that a rewind to `step` needs. From now until then,
        `forget` removes none that it needs."""
        self._kept_after = step
        return frozenset(s for s, last in self._forgotten_steps.items() if last > step)

    def recall(self, groups: Iterable[Group], *, after: int) -> list[Group]:
        """Restore removed groups that were trained after a step, after `shards_to_recall`. `groups`
        has all of them; others in it are skipped. Returns the restored ones."""
        recalled = []
        for group in groups:
            wanted = group.phase is Phase.TRAINED and group.step > after
            if wanted and group.spec.task_id not in self._groups:
                self._place(group)
                self._groups[group.spec.task_id] = group
                self._keep_settled((group,))
                self._forgotten[group.spec.shard][False, Phase.TRAINED] -= 1
                recalled.append(group)
        for shard, last in self._forgotten_steps.items():
            self._forgotten_steps[shard] = min(last, after)
        return recalled

    # Pool shards that are removed

    def on_shard(self, shard: str) -> list[Group]:
        """Groups in memory on a pool shard."""
        return [group for group in self._groups.values() if group.spec.shard == shard]

    def relocate(
        self, moved: Mapping[str, tuple[bool, Phase] | None], *, source: str, target: str
    ) -> None:
        """Groups are on `target` now. `moved` has, by task id, (evaluation, phase) of settled
        groups, which may not be in memory; None for others."""
        if source in self._forgotten_steps:
            self._note_forgotten(target, self._forgotten_steps[source])
        for task_id, settled in moved.items():
            group = self._groups.get(TaskId(task_id))
            if group is None:
                if settled is not None:
                    self._forgotten[source][settled] -= 1
                    self._forgotten[target][settled] += 1
            elif group.spec.shard == source:
                group.spec, group.moved = replace(group.spec, shard=target), True
                self.counts.relocated(group, source)
                self.dispatch.relocated(group)
                if not group.spec.evaluation:
                    self.window.relocated(group, source)

    def forgotten_on(self, shard: str) -> Counter[tuple[bool, Phase]]:
        """Settled groups of a pool shard that are not in memory, by (evaluation, phase)."""
        return +self._forgotten[shard]

    def remove_shard(self, shard: str) -> None:
        """Removes a pool shard: its settled groups that are not in memory are counted alone."""
        self._forgotten_steps.pop(shard, None)
        self._forgotten.pop(shard, None)

    def _limit_domain(self, domain: str, change: int) -> None:
        limit = self._domain_limits.get(domain)
        if limit is not None:
            self._running_of[domain] += change
            self.dispatch.hold_back(domain, self._running_of[domain] >= limit)

    def totals(self) -> GroupTotals:
        """The counts as the status shows them."""
        counts, in_window = self.counts, self.window.inside(Phase.COMPLETE)
        return GroupTotals(
            accepted=counts.accepted,
            trained=counts.of(Phase.TRAINED),
            tombstoned=counts.of(Phase.TOMBSTONED),
            # Summed separately, so that the equation is a check and not a definition.
            pending=sum(map(counts.of, PENDING)),
            queued=counts.of(Phase.QUEUED),
            running_groups=counts.running,
            complete_in_window=in_window,
            complete_outside_window=counts.of(Phase.COMPLETE) - in_window,
            eval_pending=counts.of(Phase.QUEUED, evaluation=True)
            + counts.of(Phase.RUNNING, evaluation=True),
        )
