"""All that one leader's term keeps in memory, as one thing.

Owns how the generation queue, the tasks behind it and the progress fit together, and the
translation between messages and the pure core. No waiting, no clock, no I/O: the queue actor
brings those.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from operator import attrgetter

from forge.core.errors import InvalidArgument, ResourceExhausted, Unavailable
from forge.core.queue.failures import FailureKind
from forge.core.queue.generation_queue import GenerationQueue
from forge.core.queue.group_ledger import BookStatus
from forge.core.queue.groups import Group, Phase
from forge.core.tasks.validation import MAX_PAYLOAD_BYTES
from forge.core.trajectory import TaskId, parse_trajectory_id
from forge.runtime.telemetry import log
from forge.v1 import common_pb2, scheduler_pb2
from services.scheduler import metrics
from services.scheduler.catalog import Catalog
from services.scheduler.equal_rewards import EqualRewards
from services.scheduler.messages import BatchView, Fate, Grant, GroupView, Report, RewindPlan
from services.scheduler.progress import Progress, outcome_of
from services.scheduler.settled import MOST_SETTLED, SettledGroups
from services.scheduler.stalls import Watch, head_of, why
from services.scheduler.stored import StoredGroup
from services.scheduler.validation import ACTIVITIES, digest_of

MAX_GRANT_BYTES = 3 << 20
"""Of the tasks in one answer, which must fit one gRPC message."""
RETRY_FULL_S = 5.0

_FATES = {
    Phase.TOMBSTONED: common_pb2.GROUP_STATE_TOMBSTONED,
    Phase.EVALUATED: common_pb2.GROUP_STATE_EVALUATED,
}

_ACTIVITIES = {each: number for number, each in ACTIVITIES.items()}


class TermState:
    """The queue of one term, with the tasks behind it."""

    def __init__(
        self,
        queue: GenerationQueue,
        *,
        max_pending: int,
        skip_equal_rewards: bool = False,
        stall_after_s: float = math.inf,
        most_settled: int = MOST_SETTLED,
    ) -> None:
        """`most_settled`: groups trained on that are held, and as many others that are over."""
        self.queue = queue
        self.watch = Watch()
        self._stall_after_s = stall_after_s
        self._unread: frozenset[str] = frozenset()
        """Pool shards that have not been read in this term."""
        self.catalog = Catalog()
        self.settled = SettledGroups(queue.books, self.catalog, most=most_settled)
        self.progress = Progress()
        self._max_pending = max_pending
        self._equal = EqualRewards(queue.books, enabled=skip_equal_rewards)

    # Groups

    def add(self, record: common_pb2.GroupRecord, group: Group, *, now_s: float) -> None:
        """A new group that is stored in the pool; one that is known is passed over."""
        if group.spec.task_id in self.queue.books:
            return
        self.catalog.add(record.task, digest=record.task_digest)
        self.queue.add(group, now_s=now_s)

    def restore(self, groups: Iterable[StoredGroup], *, now_s: float) -> None:
        """Groups of an earlier term in queue order, with what became of their rollouts; those that
        are known are passed over."""
        for at_rest, run in groupby(groups, key=attrgetter("at_rest")):
            together = tuple(run)
            task_ids = [one.group.spec.task_id for one in together]
            if at_rest and self.queue.books.are_new(task_ids):
                self._restore_at_rest(task_ids, together, now_s=now_s)
            else:
                for stored in together:
                    self._restore_one(stored, now_s=now_s)
        self.settled.forget()

    def _restore_at_rest(
        self, task_ids: Sequence[TaskId], stored: Sequence[StoredGroup], *, now_s: float
    ) -> None:
        """As `_restore_one` would one by one; a new leader has no time for that."""
        groups, _, entries, tags, outcomes, _ = zip(*stored, strict=True)
        self.catalog.enter(task_ids, entries, tags)
        self.queue.add_at_rest(task_ids, groups, now_s=now_s)
        self._equal.restored(groups)
        # The latest first: of the earlier ones hardly any is among the recent.
        domains = map(attrgetter("spec.domain"), reversed(groups))
        self.progress.recall(domains, reversed(outcomes))

    def _restore_one(self, stored: StoredGroup, *, now_s: float) -> None:
        group = stored.group
        task_id = group.spec.task_id
        if task_id in self.queue.books:
            return
        self.catalog.enter((task_id,), (stored.entry,), (stored.tag,))
        self.queue.add(group, now_s=now_s)
        if not group.phase.open:
            self.catalog.drop_payload(task_id)
        self._equal.restored((group,))
        self.progress.recall((group.spec.domain,), (stored.outcomes,))
        for outcome in stored.outcomes[1::2]:
            self._equal.sealed(group, outcome)

    def find_new(self, tasks: Mapping[str, common_pb2.Task]) -> list[common_pb2.Task]:
        """Those not known. Raises InvalidArgument for a known id with other content."""
        fresh = []
        for task_id, task in tasks.items():
            digest = digest_of(task)
            if (known := self.settled.is_known(task_id, digest)) is None:
                fresh.append(task)
            elif not known:
                raise InvalidArgument(
                    f"task_id {task_id!r} was submitted before with different content"
                )
        if fresh:
            # The shard may hold them: they would be sampled and trained on twice.
            self.check_all_read()
        books = self.queue.books.status()
        pending = books.pending + books.eval_pending
        if fresh and pending + len(fresh) > self._max_pending:
            raise ResourceExhausted(
                f"{pending} groups are pending and max_queued_groups is {self._max_pending}: "
                f"no room for {len(fresh)} more",
                retry_after_s=RETRY_FULL_S,
            )
        return fresh

    def view(self, task_ids: Iterable[str]) -> tuple[GroupView, ...]:
        """Those that are forgotten are left out."""
        groups = map(self.queue.books.group, self.settled.held(task_ids))
        return tuple(
            GroupView(record=self.catalog.record(group), trajectory_ids=group.sealed_ids())
            for group in groups
        )

    def by_shard(self, task_ids: Iterable[str]) -> dict[str, list[str]]:
        """Raises NotFound for an unknown task."""
        found: defaultdict[str, list[str]] = defaultdict(list)
        for task_id in task_ids:
            found[self.queue.books.group(task_id).spec.shard].append(task_id)
        return dict(found)

    def take_fates(self, *, now_s: float) -> list[tuple[str, Fate]]:
        """What became of groups since the last call, with the shard each is on."""
        fates = []
        for group in self.queue.books.settled():
            task_id = group.spec.task_id
            self.catalog.drop_payload(task_id)
            self._equal.settled(group)
            if group.phase is Phase.TOMBSTONED:
                metrics.TOMBSTONES.inc()
                self.watch.tombstoned(group.reason)
                log.warning("group_tombstoned", task_id=task_id, reason=group.reason)
            else:
                self.watch.progressed(now_s)
            fate = Fate(task_id=task_id, state=_FATES[group.phase], reason=group.reason)
            fates.append((group.spec.shard, fate))
        self.settled.forget()
        return fates

    # Shards

    def set_away(self, shards: frozenset[str], *, unread: frozenset[str], now_s: float) -> None:
        """`unread`: those of them that have not been read in this term."""
        self.queue.books.away = shards
        was_unread, self._unread = self._unread, unread
        if was_unread and not unread:
            self.queue.books.window.all_known()
            self.queue.rollouts.all_read(now_s=now_s)

    def unread_error(self, what: str) -> Unavailable | None:
        """What to answer instead of `what`, a task that is not known; None when all shards have
        been read."""
        if not self._unread:
            return None
        names = ", ".join(sorted(self._unread))
        return Unavailable(f"{what}; it may be on pool shard {names}, which is awaited")

    def check_read(self, task_ids: Iterable[str]) -> None:
        """Raises Unavailable for a task that may be on a shard that has not been read."""
        for task_id in task_ids:
            if task_id not in self.queue.books and (
                error := self.unread_error(f"task_id {task_id!r} is not known")
            ):
                raise error

    def check_all_read(self) -> None:
        """Raises Unavailable while a shard has not been read."""
        if error := self.unread_error("not all tasks are known"):
            raise error

    # Rollouts

    def grant(self, *, runner_id: str, max_rollouts: int, now_s: float) -> tuple[Grant, ...]:
        """The next rollouts, as many as fit one answer."""
        grants: list[Grant] = []
        size_bytes = 0
        while len(grants) < max_rollouts and size_bytes < MAX_GRANT_BYTES - MAX_PAYLOAD_BYTES:
            claims = self.queue.rollouts.lease(runner_id=runner_id, max_rollouts=1, now_s=now_s)
            if not claims:
                break
            task = self.catalog.task(claims[0].task_id)
            size_bytes += task.ByteSize()
            grants.append(
                Grant(
                    trajectory_id=claims[0].trajectory_id,
                    rollout_index=claims[0].rollout_index,
                    failures=claims[0].failures,
                    pool_shard=self.queue.books.group(task.task_id).spec.shard,
                    task=task,
                )
            )
        return tuple(grants)

    def renew(self, lease_ids: Iterable[str], *, now_s: float) -> tuple[str, ...]:
        """The ids that are lost."""
        rollouts = self.queue.rollouts
        renew = rollouts.renew_unread if self._unread else rollouts.renew
        return tuple(lease for lease in lease_ids if not renew(lease, now_s=now_s))

    def locate(self, trajectory_ids: Iterable[str]) -> dict[str, list[str]]:
        """The ids by pool shard, without those of groups that are forgotten. Raises NotFound."""
        found: defaultdict[str, list[str]] = defaultdict(list)
        for trajectory_id in trajectory_ids:
            if self._is_forgotten(trajectory_id):
                continue
            found[self.queue.rollouts.group_of(trajectory_id).spec.shard].append(trajectory_id)
        return dict(found)

    def settle(self, report: Report, *, now_s: float) -> None:
        """An attempt ended, and this is what the pool holds of it; for a group that is forgotten,
        that changes nothing."""
        if self._is_forgotten(report.trajectory_id):
            return
        summary = report.summary
        if summary is not None and summary.state == common_pb2.TRAJECTORY_STATE_SEALED:
            if self.queue.rollouts.complete(report.trajectory_id, now_s=now_s):
                self._count(summary)
                group = self.queue.rollouts.group_of(report.trajectory_id)
                if not group.phase.open:
                    self.catalog.drop_payload(group.spec.task_id)
            return
        if report.silent:
            kind = self.queue.rollouts.lapse(report.trajectory_id, now_s=now_s)
            if kind is not None:
                self._failed(report.trajectory_id, kind, "its claim ended, its runner is silent")
            return
        reason = report.error or "it ended without a sealed trajectory"
        failed = self.queue.rollouts.fail(
            report.trajectory_id,
            reason=reason,
            permanent=report.permanent,
            kind=report.kind,
            now_s=now_s,
        )
        if failed:
            self._failed(report.trajectory_id, report.kind, reason)

    def _is_forgotten(self, trajectory_id: str) -> bool:
        return self.queue.books.is_forgotten(parse_trajectory_id(trajectory_id).task_id)

    def _failed(self, trajectory_id: str, kind: FailureKind, reason: str) -> None:
        metrics.FAILURES.labels(kind.value).inc()
        if kind is FailureKind.INFRASTRUCTURE:
            self.watch.fault(reason)
        log.info("rollout_failed", trajectory_id=trajectory_id, kind=kind.value, reason=reason)

    def expire(self, now_s: float) -> dict[str, list[str]]:
        """Take back late batches; the attempts to look up, by pool shard.

        Those on a shard that is away keep their place until it answers.
        """
        expired = self.locate(self.queue.expire(now_s))
        return {s: ids for s, ids in expired.items() if s not in self.queue.books.away}

    def _count(self, summary: common_pb2.TrajectorySummary) -> None:
        group = self.queue.rollouts.group_of(summary.trajectory_id)
        if not group.spec.evaluation:
            outcome = outcome_of(summary)
            self.progress.record(
                group.spec.domain, sealed_unix_s=summary.sealed_unix_s, outcome=outcome
            )
            self._equal.sealed(group, outcome)

    # Batches

    def take(self, *, trainer_id: str, max_groups: int, now_s: float) -> BatchView | None:
        batch = self.queue.take(trainer_id=trainer_id, max_groups=max_groups, now_s=now_s)
        if batch is None:
            return None
        self.watch.batch_taken(trainer_id, batch.batch_id, now_s)
        return BatchView(batch_id=batch.batch_id, groups=self.view(batch.task_ids))

    def prepare_commit(
        self, batch_id: str, *, step: int, task_ids: Sequence[str], now_s: float
    ) -> dict[str, list[str]]:
        prepared = self.queue.batches.prepare_commit(
            batch_id, step=step, task_ids=task_ids, now_s=now_s
        )
        return self.by_shard(prepared)

    def commit(self, batch_id: str, *, step: int, now_s: float) -> None:
        self.queue.batches.commit(batch_id, step=step)
        self.watch.progressed(now_s)

    def shards_to_recall(self, step: int) -> frozenset[str]:
        """Pool shards to read for `recall` before a rewind to `step` is prepared; none when all
        that it takes back is held. Raises Unavailable, as `prepare_rewind` does."""
        self.check_all_read()
        return self.settled.shards_to_recall(step)

    def prepare_rewind(self, step: int) -> RewindPlan:
        """Raises Unavailable while a shard has not been read: it may have groups to take back."""
        self.check_all_read()
        undone = self.queue.batches.prepare_rewind(step)
        books = self.queue.books
        indices = [books.group(task_id).spec.index for task_id in undone]
        return RewindPlan(
            void_before=self.queue.batches.void_before,
            groups=self.by_shard(undone),
            head=min([books.window.lowest_pending, *indices]),
        )

    def prepare_release(self, batch_id: str, *, now_s: float) -> dict[str, list[str]]:
        return self.by_shard(self.queue.batches.prepare_release(batch_id, now_s=now_s))

    # Sight

    def status(self, *, now_s: float) -> scheduler_pb2.GetSchedulerStatusResponse:
        queue, books = self.queue, self.queue.books.status()
        shares, adaptive = queue.shares.shares, self.queue.books.adaptive
        return scheduler_pb2.GetSchedulerStatusResponse(
            head=queue.books.window.head,
            window=queue.books.window.width,
            concurrency=queue.settings.concurrency,
            queued=books.queued,
            running_groups=books.running,
            running_rollouts=len(queue.rollouts),
            complete_in_window=books.complete_in_window,
            complete_outside_window=books.complete_outside_window,
            accepted=books.accepted,
            trained=books.trained,
            tombstoned=books.tombstoned,
            pending=books.pending,
            domains=[
                scheduler_pb2.DomainStatus(
                    domain=domain,
                    share=shares.get(domain, 0.0),
                    completed_rollouts=self.progress.completed(domain),
                    recent_reward=self.progress.recent_reward(domain),
                )
                for domain in self.progress.domains(shares)
            ],
            eval_pending=books.eval_pending,
            retries=queue.rollouts.retries,
            activity=_ACTIVITIES[queue.books.activity],
            mode=queue.settings.mode.value,
            admission="adaptive" if adaptive else queue.settings.admission.value,
            running_limit=adaptive.running_limit if adaptive else queue.settings.concurrency,
            staleness_p99=adaptive.staleness_p99 if adaptive else 0.0,
            shift_kl=adaptive.last_shift_kl if adaptive else 0.0,
            skipped=self._equal.skipped,
            surplus=queue.rollouts.surplus,
            taking_over=now_s < queue.rollouts.hold_until_s,
            stall=self._stall(books, now_s),
            untrained_s=self.watch.idle_s(now_s),
            shards_away=sorted(queue.books.away),
            faults=self.watch.all_faults,
        )

    def _stall(self, books: BookStatus, now_s: float) -> scheduler_pb2.Stall | None:
        if self.watch.idle_s(now_s) < self._stall_after_s:
            return None
        queue = self.queue
        facts = self.watch.facts(
            now_s,
            batch_is_out=queue.batches.get(self.watch.batch_out()) is not None,
            activity=queue.books.activity,
            waiting=books.pending + books.eval_pending,
            queued=books.queued,
            running=books.running,
            complete_in_window=books.complete_in_window,
            assigned=queue.books.window.assigned,
            complete_outside_window=books.complete_outside_window,
            rollouts=len(queue.rollouts),
            away=queue.books.away,
            head=head_of(queue),
        )
        stall = why(facts, after_s=self._stall_after_s)
        return scheduler_pb2.Stall(cause=stall.cause, text=stall.text) if stall else None
