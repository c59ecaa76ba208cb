"""The state of one leader's term in memory.

Owns how the generation queue, its tasks and the progress work together, and the translation between
messages and the pure core. No waiting, no clock, no I/O: those are the queue actor's.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

from forge.core.errors import InvalidArgument, NotFound, ResourceExhausted, Unavailable
from forge.core.queue.dispatch.failures import FailureKind
from forge.core.queue.generation_queue import GenerationQueue
from forge.core.queue.groups import ANY, Abilities, Group, Phase, TaskKind
from forge.core.tasks.task_digest import task_digest
from forge.core.tasks.validation import MAX_PAYLOAD_BYTES
from forge.core.trajectory import parse_trajectory_id
from forge.runtime.telemetry import log
from forge.v1 import common_pb2
from services.scheduler import metrics
from services.scheduler.shards.pool_shards import GroupStateChange
from services.scheduler.state.domain_progress import DomainProgress, outcome_of
from services.scheduler.state.draining_runners import DrainingRunners
from services.scheduler.state.dynamic_sampling import EqualRewards
from services.scheduler.state.earlier_groups import EarlierGroups
from services.scheduler.state.erased_groups import ErasedGroups
from services.scheduler.state.messages.batches import (
    BatchView,
    CommitBatch,
    GroupView,
    RewindPlan,
)
from services.scheduler.state.messages.groups import DropGroups, FindNew, LookedUp, LookUp
from services.scheduler.state.messages.rollouts import AttemptReport, Grant, Located
from services.scheduler.state.settled_groups import SettledGroups
from services.scheduler.state.stalls import Watch
from services.scheduler.state.task_catalog import STATES, Catalog

MAX_GRANT_BYTES = (4 << 20) - MAX_PAYLOAD_BYTES - (512 << 10)
"""Bytes of leases after which an answer gets no other: a message has room for the largest one."""
RETRY_FULL_S = 5.0


class TermState:
    """The queue of one term and its tasks."""

    def __init__(
        self,
        queue: GenerationQueue,
        *,
        max_pending: int,
        skip_equal_rewards: bool = False,
        stall_after_s: float = math.inf,
        most_settled: float = math.inf,
        draining_runners: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """`most_settled`: trained groups in memory, and as many other settled groups;
        `draining_runners`: as in the term record."""
        self.queue = queue
        self.watch = Watch()
        self.draining = DrainingRunners(draining_runners)
        self.stall_after_s = stall_after_s
        self.unreachable: frozenset[str] = frozenset()
        """Pool shards that may have groups."""
        self.retiring: frozenset[str] = frozenset()
        """Pool shards whose groups move away."""
        self._unread: frozenset[str] = frozenset()
        """Pool shards that have not been read in this term."""
        self.catalog = Catalog()
        self.erased = ErasedGroups(queue)
        self.settled = SettledGroups(queue.ledger, self.catalog, most=most_settled)
        self.progress = DomainProgress()
        self._max_pending = max_pending
        self.equal = EqualRewards(queue.ledger, enabled=skip_equal_rewards)
        self.earlier = EarlierGroups(queue, self.catalog, self.settled, self.progress, self.equal)

    # Groups

    def add_group(self, record: common_pb2.GroupRecord, group: Group, *, now_s: float) -> None:
        """Add a new group that is stored in the pool, unless it is in memory."""
        if group.spec.task_id in self.queue.ledger:
            return
        if not self.queue.ledger.counts.any_pending():
            self.watch.work_came(now_s)
        self.catalog.add(record.task, digest=record.task_digest)
        self.queue.add_group(group, now_s=now_s)
        self.erased.added(group.spec.task_id)

    def find_new(self, ask: FindNew) -> list[common_pb2.Task] | LookUp:
        """The new tasks. Raises InvalidArgument for a known id with different content."""
        asked = (task_id for task_id in ask.tasks if task_id not in ask.uncertain)
        if missing := self.settled.missing(asked, ask.looked_up):
            return missing
        fresh = []
        for task_id, task in ask.tasks.items():
            digest = task_digest(task)
            if (known := self.settled.is_known(task_id, digest, ask.looked_up)) is None:
                fresh.append(task)
            elif not known:
                raise InvalidArgument(
                    f"task_id {task_id!r} was submitted before with different content"
                )
        if fresh:
            # An unread shard may hold them: they would be sampled and trained on twice.
            self.check_all_read()
        totals = self.queue.ledger.totals()
        pending = totals.pending + totals.eval_pending
        if fresh and pending + len(fresh) > self._max_pending:
            raise ResourceExhausted(
                f"{pending} groups are pending and max_queued_groups is {self._max_pending}: "
                f"no room for {len(fresh)} more",
                retry_after_s=RETRY_FULL_S,
            )
        return fresh

    def view(self, task_ids: Iterable[str]) -> tuple[GroupView, ...]:
        """The groups that are in memory."""
        groups = map(self.queue.ledger.group, self.settled.in_memory(task_ids))
        return tuple(
            GroupView(
                record=self.catalog.record(group),
                trajectory_ids=group.sealed_ids(),
                phase=group.phase.value,
            )
            for group in groups
        )

    def by_shard(self, task_ids: Iterable[str]) -> dict[str, list[str]]:
        """Raises NotFound for an unknown task."""
        by_shard: defaultdict[str, list[str]] = defaultdict(list)
        for task_id in task_ids:
            by_shard[self.queue.ledger.group(task_id).spec.shard].append(task_id)
        return dict(by_shard)

    def take_final_states(self, *, now_s: float) -> list[tuple[str, GroupStateChange]]:
        """Groups tombstoned or evaluated since the last call, each with its pool shard."""
        changes = []
        for group in self.queue.ledger.settled():
            task_id = group.spec.task_id
            self.catalog.drop_payload(task_id)
            self.equal.settled(group)
            if group.phase is Phase.TOMBSTONED:
                metrics.TOMBSTONES.inc()
                self.watch.tombstoned(task_id, group.reason, failed=group.sealed < group.spec.size)
                log.warning("group_tombstoned", task_id=task_id, reason=group.reason)
            else:
                self.watch.progressed(now_s)
            state = STATES[group.phase]
            change = GroupStateChange(task_id=task_id, state=state, reason=group.reason)
            changes.append((group.spec.shard, change))
        self.settled.forget()
        return changes

    # Shards

    def set_away(
        self,
        shards: frozenset[str],
        *,
        unread: frozenset[str],
        now_s: float,
        retiring: frozenset[str] = frozenset(),
    ) -> None:
        """`unread`: those that have not been read in this term; `retiring`: reachable, but their
        groups wait until they have moved."""
        self.unreachable, self.retiring = shards, retiring
        self.queue.set_away(shards | retiring)
        was_unread, self._unread = self._unread, unread
        if was_unread and not unread:
            self.queue.all_read(now_s=now_s)

    def unread_error(self, what: str) -> Unavailable | None:
        """Error for an unknown task, `what`, which an unread shard may have; None if every shard
        was read."""
        if not self._unread:
            return None
        names = ", ".join(sorted(self._unread))
        return Unavailable(f"{what}; it may be on pool shard {names}, which is awaited")

    def check_read(self, task_ids: Iterable[str]) -> None:
        """Raises Unavailable for a task that may be on a shard that has not been read."""
        for task_id in task_ids:
            if task_id not in self.queue.ledger and (
                error := self.unread_error(f"task_id {task_id!r} is not known")
            ):
                raise error

    def check_all_read(self) -> None:
        """Raises Unavailable while a shard has not been read."""
        if error := self.unread_error("not all tasks are known"):
            raise error

    # Rollouts

    def grant(
        self,
        *,
        runner_id: str,
        max_rollouts: int,
        now_s: float,
        able: Abilities = ANY,
        lease_bytes: Callable[[common_pb2.Task], int] = common_pb2.Task.ByteSize,
    ) -> tuple[Grant, ...]:
        """The next rollouts, up to the size of one answer; `lease_bytes` bounds that of a lease."""
        grants: list[Grant] = []
        size_bytes = 0
        while len(grants) < max_rollouts and size_bytes < MAX_GRANT_BYTES:
            claims = self.queue.rollouts.lease(
                runner_id=runner_id, max_rollouts=1, now_s=now_s, able=able
            )
            if not claims:
                break
            task = self.catalog.task(claims[0].task_id)
            size_bytes += lease_bytes(task)
            grants.append(
                Grant(
                    trajectory_id=claims[0].trajectory_id,
                    rollout_index=claims[0].rollout_index,
                    failures=claims[0].failures,
                    pool_shard=self.queue.ledger.group(task.task_id).spec.shard,
                    task=task,
                )
            )
        return tuple(grants)

    def renew(
        self, lease_ids: Iterable[str], *, now_s: float, runner_id: str = ""
    ) -> tuple[str, ...]:
        """Renews leases; returns the ids of lost ones."""
        rollouts = self.queue.rollouts
        renew = rollouts.renew_unread if self._unread else rollouts.renew
        ids = tuple(lease_ids)
        for known in {runner_id, *map(rollouts.runner_of, ids)}:
            self.watch.runner_renewed(known, now_s)
        return tuple(lease for lease in ids if not renew(lease, now_s=now_s, runner_id=runner_id))

    def unserved(self, *, now_s: float) -> list[TaskKind]:
        """Kinds of waiting tasks that no live runner declares; none while no runner calls."""
        ledger = self.queue.ledger
        return self.watch.unserved(ledger.dispatch.waiting_kinds(ledger.away), now_s)

    def locate(self, trajectory_ids: Iterable[str]) -> Located:
        """The pool shards of trajectories whose groups are in memory."""
        by_shard: defaultdict[str, list[str]] = defaultdict(list)
        unknown: dict[str, str] = {}
        absent: list[str] = []
        for trajectory_id in trajectory_ids:
            if parse_trajectory_id(trajectory_id).task_id not in self.queue.ledger:
                absent.append(trajectory_id)
                continue
            try:
                group = self.queue.rollouts.group_of(trajectory_id)
            except NotFound as error:
                unknown[trajectory_id] = str(error)
            else:
                by_shard[group.spec.shard].append(trajectory_id)
        return Located(by_shard=by_shard, unknown=unknown, absent=absent)

    def find_unknown(
        self, trajectory_ids: Sequence[str], looked_up: LookedUp
    ) -> dict[str, str] | LookUp:
        """The reasons by id, without trajectories of settled groups that only the pool has. Raises
        Unavailable."""
        tasks = {each: parse_trajectory_id(each).task_id for each in trajectory_ids}
        if missing := self.settled.missing(tasks.values(), looked_up):
            return missing
        if any(task_id in self.queue.ledger for task_id in tasks.values()):
            raise Unavailable("a pool shard has just been read: report the results again")
        unknown = {
            each: f"task_id {task_id!r} is not in the queue"
            for each, task_id in tasks.items()
            if task_id not in looked_up.groups
        }
        self.check_read(tasks[each] for each in unknown)
        return unknown

    def settle(self, report: AttemptReport, *, now_s: float) -> None:
        """Apply the end of an attempt; changes nothing if its group is no longer in memory."""
        if parse_trajectory_id(report.trajectory_id).task_id not in self.queue.ledger:
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
                self._failed(
                    report.trajectory_id, kind, "its lease expired, and its runner is silent"
                )
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

    def _failed(self, trajectory_id: str, kind: FailureKind, reason: str) -> None:
        metrics.FAILURES.labels(kind.value).inc()
        if kind is FailureKind.INFRASTRUCTURE:
            self.watch.fault(reason)
        log.info("rollout_failed", trajectory_id=trajectory_id, kind=kind.value, reason=reason)

    def expire(self, now_s: float) -> dict[str, list[str]]:
        """Take back late batches. Returns the attempts to look up, by reachable pool shard."""
        expired: defaultdict[str, list[str]] = defaultdict(list)
        for trajectory_id in self.queue.expire(now_s):
            shard = self.queue.rollouts.group_of(trajectory_id).spec.shard
            if shard not in self.unreachable:
                expired[shard].append(trajectory_id)
        return dict(expired)

    def _count(self, summary: common_pb2.TrajectorySummary) -> None:
        group = self.queue.rollouts.group_of(summary.trajectory_id)
        if not group.spec.evaluation:
            outcome = outcome_of(summary)
            self.progress.record(
                group.spec.domain, sealed_unix_s=summary.sealed_unix_s, outcome=outcome
            )
            self.equal.sealed(group, outcome)

    # Batches

    def take_batch(self, *, trainer_id: str, max_groups: int, now_s: float) -> BatchView | None:
        """The batch that the trainer holds, or a new one, or None for now."""
        batch = self.queue.take_batch(trainer_id=trainer_id, max_groups=max_groups, now_s=now_s)
        if batch is None:
            self.watch.trainer_waits = self.queue.batches.get(self.watch.batch_out()) is None
            return None
        self.watch.batch_taken(trainer_id, batch.batch_id, now_s)
        return BatchView(batch_id=batch.batch_id, groups=self.view(batch.task_ids))

    def prepare_commit(self, ask: CommitBatch, *, now_s: float) -> dict[str, list[str]] | LookUp:
        """Task ids by pool shard to store as TRAINED; see `Batches.prepare_commit`."""
        batches, looked_up = self.queue.batches, ask.looked_up
        if batches.get(ask.batch_id) is None:
            known = batches.committed_by(ask.batch_id) is not None
            unheld = any(task_id not in self.queue.ledger for task_id in ask.task_ids)
            # With all groups in memory, the batch was taken back, or another leader granted it.
            batch_id = "" if known or not (unheld or not ask.task_ids) else ask.batch_id
            if missing := self.settled.missing(ask.task_ids, looked_up, batch_id=batch_id):
                return missing
        prepared = batches.prepare_commit(
            ask.batch_id,
            step=ask.step,
            task_ids=ask.task_ids,
            now_s=now_s,
            committed_by=looked_up.commits.get(ask.batch_id),
            settled=looked_up.groups.keys(),
        )
        return self.by_shard(prepared)

    def commit(self, batch_id: str, *, step: int, now_s: float) -> None:
        """The groups of a batch are stored as TRAINED."""
        self.queue.batches.commit(batch_id, step=step)
        self.watch.progressed(now_s)

    def shards_to_recall(self, step: int) -> frozenset[str]:
        """Pool shards to read before a rewind to `step` is prepared, for `SettledGroups.recall`.
        Raises Unavailable, as `prepare_rewind` does."""
        self.check_all_read()
        return self.queue.ledger.shards_to_recall(step)

    def prepare_rewind(self, step: int) -> RewindPlan:
        """Raises Unavailable while a pool shard is unread, which may have groups of later steps."""
        self.check_all_read()
        undone = self.queue.batches.prepare_rewind(step)
        ledger = self.queue.ledger
        indices = [ledger.group(task_id).spec.index for task_id in undone]
        return RewindPlan(
            void_before=self.queue.batches.void_before,
            groups=self.by_shard(undone),
            head=min([self.queue.window.lowest_pending, *indices]),
        )

    def prepare_drop(self, ask: DropGroups) -> dict[str, list[str]]:
        """Task ids of the pending groups that are in no batch, by pool shard. Raises NotFound."""
        ledger = self.queue.ledger
        named = map(ledger.group, ask.task_ids) if ask.task_ids else ledger.of_domain(ask.domain)
        return self.by_shard(
            group.spec.task_id
            for group in named
            if group.phase.droppable and ask.scaffold in ("", group.spec.scaffold)
        )

    def prepare_release(self, batch_id: str, *, now_s: float) -> dict[str, list[str]]:
        """Task ids of a batch, by pool shard."""
        return self.by_shard(self.queue.batches.prepare_release(batch_id, now_s=now_s))
