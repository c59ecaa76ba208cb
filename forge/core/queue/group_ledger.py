"""The books of the generation queue: every group, its phase, and the sums.

    accepted = trained + tombstoned + pending

Owns each change of phase, so that counts, window and order cannot disagree, and what is held of a
group that is settled: for a while all of it, then its share of the counts alone.
Why a group changes phase is for `forge.core.queue.rollouts` (sampling) and
`forge.core.queue.batches` (training) to say.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

from forge.core.errors import InvalidArgument, NotFound
from forge.core.queue.activity import Activity
from forge.core.queue.adaptive import Adaptive
from forge.core.queue.dispatch import Dispatch
from forge.core.queue.groups import Group, Phase
from forge.core.queue.window import Window
from forge.core.trajectory import TaskId

_PURPOSE_AND_PHASE = attrgetter("spec.evaluation", "phase")


@dataclass(frozen=True, slots=True, kw_only=True)
class BookStatus:
    """Training groups by where they stand."""

    accepted: int
    trained: int
    tombstoned: int
    pending: int
    queued: int
    running: int
    """Of both purposes: what counts against N."""
    complete_in_window: int
    complete_outside_window: int
    eval_pending: int


class Books:
    """All groups of one leader's term."""

    def __init__(
        self,
        window: Window,
        adaptive: Adaptive | None = None,
        *,
        domain_limits: Mapping[str, int] | None = None,
        reach: int = 0,
    ) -> None:
        """`domain_limits`: most groups of a domain that run at once, of both purposes. `reach`:
        how many older groups a priority may start before, at most."""
        self.window = window
        self.adaptive = adaptive
        self._domain_limits = dict(domain_limits or {})
        self.dispatch = Dispatch(frozenset(self._domain_limits))
        self._reach = reach
        self._running_of: Counter[str] = Counter()
        """By domain, of those with a limit."""
        self.away: frozenset[str] = frozenset()
        """Pool shards that do not answer: nothing on them is handed out or waited for."""
        self.activity = Activity.RUNNING
        self.next_eval_index = 0
        """One above the highest index of an evaluation group."""
        self.added_s = 0.0
        """When a group was last added."""
        self._groups: dict[TaskId, Group] = {}
        self._counts: Counter[tuple[bool, Phase]] = Counter()
        """By (evaluation, phase)."""
        self._running_groups = 0
        self._running: Counter[tuple[bool, str]] = Counter()
        """By (evaluation, pool shard)."""
        self._trained: defaultdict[int, list[Group]] = defaultdict(list)
        """By optimizer step."""
        self._trained_held = 0
        """How many groups these are."""
        self._settled: list[Group] = []
        self._over: deque[Group] = deque()
        """Tombstoned and evaluated groups that are held, and whose fate was told."""
        self._forgotten_steps: dict[str, int] = {}
        """By pool shard with groups that are settled and not held: no later step trained one of
        them."""
        self._kept_after = math.inf
        """Groups of later steps are held, for a rewind that is under way."""

    def __contains__(self, task_id: str) -> bool:
        """Whether a group of that id is held."""
        return task_id in self._groups

    def group(self, task_id: str) -> Group:
        """Raises NotFound for one that is not held."""
        try:
            return self._groups[TaskId(task_id)]
        except KeyError:
            raise NotFound(f"task_id {task_id!r} is not in the queue") from None

    @property
    def forgotten_shards(self) -> frozenset[str]:
        """Pool shards with groups that are settled and not held."""
        return frozenset(self._forgotten_steps)

    def held(self) -> int:
        """Groups in memory."""
        return len(self._groups)

    def begin_at(self, head: int) -> None:
        """Every training group with a lower index is settled. Comes before any group is added."""
        self.window.begin_at(head)
        if self.adaptive:
            self.adaptive.begin_at(head)

    def leave_out(
        self,
        shard: str,
        counts: Mapping[tuple[bool, Phase], int],
        *,
        next_index: int,
        next_eval_index: int,
        last_step: int,
    ) -> None:
        """Settled groups of a pool shard that are counted, by (evaluation, phase), and not held;
        all others of the shard are added. `next_index` is above each index on the shard;
        `last_step`: none of them was trained by a later step."""
        self._counts.update(counts)
        self.window.reserve(next_index)
        self.next_eval_index = max(self.next_eval_index, next_eval_index)
        if any(counts.values()):
            self._note_forgotten(shard, last_step)

    def add(self, group: Group, *, now_s: float) -> None:
        """Accept a group, new or as an earlier term left it. Raises InvalidArgument."""
        spec = group.spec
        if spec.task_id in self:
            raise InvalidArgument(f"task_id {spec.task_id!r} was submitted before")
        assert group.phase is Phase.QUEUED or not group.phase.open
        self._place(group)
        self._groups[spec.task_id] = group
        self._counts[spec.evaluation, group.phase] += 1
        self.added_s = now_s
        self._keep_settled((group,))
        if spec.evaluation:
            self.next_eval_index = max(self.next_eval_index, spec.index + 1)
        else:
            self.window.add(group)
            if self.adaptive and group.phase.consumed:
                self.adaptive.gave_up(group)
        if not self.close_if_sealed(group, now_s) and group.phase is Phase.QUEUED:
            self.dispatch.list_group(group)

    def are_new(self, task_ids: Sequence[TaskId]) -> bool:
        """Whether none of them is held, and none is named twice."""
        return len(set(task_ids)) == len(task_ids) and not any(each in self for each in task_ids)

    def add_at_rest(
        self, task_ids: Sequence[TaskId], groups: Sequence[Group], *, now_s: float
    ) -> None:
        """`add` for many new groups of an earlier term in queue order, each of which is over, or
        not begun; some five times as fast."""
        self._groups.update(zip(task_ids, groups, strict=True))
        self._counts.update(map(_PURPOSE_AND_PHASE, groups))
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
        if self.adaptive:
            for group in training:
                if group.phase.consumed:
                    self.adaptive.gave_up(group)

    def _place(self, group: Group) -> None:
        """In the order of starts."""
        spec = group.spec
        if spec.priority and not spec.evaluation and (gained := min(spec.priority, self._reach)):
            # Before the oldest that it passes, and behind the next one.
            group.place = spec.index - gained - 0.5
        else:
            group.place = spec.index

    def move(self, group: Group, phase: Phase) -> None:
        before, group.phase = group.phase, phase
        spec = group.spec
        self._counts[spec.evaluation, before] -= 1
        self._counts[spec.evaluation, phase] += 1
        change = (phase is Phase.RUNNING) - (before is Phase.RUNNING)
        if change:
            self._running[spec.evaluation, spec.shard] += change
            self._running_groups += change
            self._limit_domain(spec.domain, change)
        if not spec.evaluation:
            self.window.moved(group, before)

    def move_batch(self, groups: Sequence[Group], before: Phase, phase: Phase) -> None:
        """Training groups that are not open go from one phase to another together."""
        for group in groups:
            group.phase = phase
        self._counts[False, before] -= len(groups)
        self._counts[False, phase] += len(groups)
        self.window.moved_together(groups, before)
        if self.adaptive and phase is Phase.COMPLETE:
            self.adaptive.came_back(groups)
        elif self.adaptive and phase is Phase.BATCHED:
            self.adaptive.taken(groups)

    def start(self, group: Group, now_s: float) -> None:
        """Its first rollout goes out."""
        self.move(group, Phase.RUNNING)
        if self.adaptive and not group.spec.evaluation:
            self.adaptive.started(group, now_s)

    def close_if_sealed(self, group: Group, now_s: float) -> bool:
        """Once all its rollouts are sealed, a group is complete, or evaluated."""
        if not group.phase.open or group.sealed < group.spec.size:
            return False
        group.close()
        self.move(group, Phase.EVALUATED if group.spec.evaluation else Phase.COMPLETE)
        if group.spec.evaluation:
            self._settled.append(group)
        elif self.adaptive:
            self.adaptive.completed(group, now_s)
        return True

    def tombstone(self, group: Group, reason: str) -> None:
        """Give a group up; nobody holds a claim on its rollouts any more."""
        if group.phase.open:
            group.close()
        group.reason = reason
        self.move(group, Phase.TOMBSTONED)
        self._settled.append(group)
        if self.adaptive and not group.spec.evaluation:
            self.adaptive.gave_up(group)

    def train(self, groups: Sequence[Group], *, step: int) -> None:
        """The groups of a batch were trained on."""
        for group in groups:
            group.step = step
        self._trained[step] += groups
        self._trained_held += len(groups)
        # One that was under way has ended, or was given up.
        self._kept_after = math.inf
        self.move_batch(groups, Phase.BATCHED, Phase.TRAINED)
        if self.adaptive:
            self.adaptive.trained(groups, head=self.window.head, queued=self.queued())

    def trained_after(self, step: int) -> list[Group]:
        return [g for known, groups in self._trained.items() if known > step for g in groups]

    def rewind(self, step: int) -> list[Group]:
        """What was trained after `step` is complete again."""
        undone = self.trained_after(step)
        for group in undone:
            group.phase, group.batch_id, group.step = Phase.COMPLETE, "", 0
        self._counts[False, Phase.TRAINED] -= len(undone)
        self._counts[False, Phase.COMPLETE] += len(undone)
        for later in [known for known in self._trained if known > step]:
            del self._trained[later]
        self._trained_held -= len(undone)
        self._kept_after = math.inf
        self.window.rebuild(undone)
        if self.adaptive:
            self.adaptive.came_back(undone)
        return undone

    def settled(self) -> tuple[Group, ...]:
        """Groups tombstoned or evaluated since the last call: their fate is to be stored."""
        settled, self._settled = tuple(self._settled), []
        self._over += settled
        return settled

    def _keep_settled(self, groups: Iterable[Group]) -> None:
        """Groups that an earlier term settled, if they are."""
        for group in groups:
            if group.phase is Phase.TRAINED:
                self._trained[group.step].append(group)
                self._trained_held += 1
            elif group.phase.consumed:
                self._over.append(group)

    def forget(self, *, most: float) -> list[Group]:
        """Let go of what was settled first, so that of groups trained on about `most` are held, and
        of others as many; those that left. All counts stay.

        A step's groups go together, and those of the last step stay. What a later rewind needs of
        them is to be held again first, see `shards_to_recall`.
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
        return gone

    def _note_forgotten(self, shard: str, step: int) -> None:
        self._forgotten_steps[shard] = max(self._forgotten_steps.get(shard, 0), step)

    def shards_to_recall(self, step: int) -> frozenset[str]:
        """Pool shards with groups that a rewind to `step` takes back and that are forgotten; from
        now until then, none of those that it takes back is."""
        self._kept_after = step
        return frozenset(s for s, last in self._forgotten_steps.items() if last > step)

    def recall(self, groups: Iterable[Group], *, after: int) -> list[Group]:
        """Hold again what was trained after a step: `groups` has each group of those that is
        forgotten, and others are passed over; those that came back. `shards_to_recall` came
        first."""
        recalled = []
        for group in groups:
            wanted = group.phase is Phase.TRAINED and group.step > after
            if wanted and group.spec.task_id not in self._groups:
                self._place(group)
                self._groups[group.spec.task_id] = group
                self._keep_settled((group,))
                recalled.append(group)
        for shard, last in self._forgotten_steps.items():
            self._forgotten_steps[shard] = min(last, after)
        return recalled

    def complete(self) -> int:
        """Groups that are complete and in no batch."""
        return self._counts[False, Phase.COMPLETE]

    def untrained(self) -> int:
        """Training groups that were started, and neither trained on nor given up."""
        return sum(self._counts[False, phase] for phase in _STARTED)

    def started_inside(self) -> int:
        """Those of them that the window has reached."""
        return sum(self.window.inside(phase) for phase in _STARTED)

    def queued(self) -> int:
        """Training groups that were not started."""
        return self._counts[False, Phase.QUEUED]

    def running(self) -> int:
        """Groups of both purposes."""
        return self._running_groups

    def runs(self, *, evaluation: bool) -> bool:
        """Whether a group of a purpose runs on a shard that is not away."""
        return any(
            count and purpose is evaluation and shard not in self.away
            for (purpose, shard), count in self._running.items()
        )

    def _limit_domain(self, domain: str, change: int) -> None:
        limit = self._domain_limits.get(domain)
        if limit is not None:
            self._running_of[domain] += change
            self.dispatch.hold_back(domain, self._running_of[domain] >= limit)

    def running_training(self) -> int:
        return self._counts[False, Phase.RUNNING]

    def status(self) -> BookStatus:
        count = self._counts
        trained, tombstoned = count[False, Phase.TRAINED], count[False, Phase.TOMBSTONED]
        accepted = sum(n for (evaluation, _), n in count.items() if not evaluation)
        in_window = self.window.inside(Phase.COMPLETE)
        return BookStatus(
            accepted=accepted,
            trained=trained,
            tombstoned=tombstoned,
            # Counted on its own, so that the sum is a check and not a definition.
            pending=sum(count[False, phase] for phase in _PENDING),
            queued=count[False, Phase.QUEUED],
            running=self.running(),
            complete_in_window=in_window,
            complete_outside_window=self.complete() - in_window,
            eval_pending=count[True, Phase.QUEUED] + count[True, Phase.RUNNING],
        )


_PENDING = (Phase.QUEUED, Phase.RUNNING, Phase.COMPLETE, Phase.BATCHED)
_STARTED = _PENDING[1:]
