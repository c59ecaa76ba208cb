"""Leases batches and prepares the next one (fetch, credit, plan) during the current step.

Owns the leases of batches: lease, renewal, commit and release. One batch is prepared ahead of the
one in training. Each is leased under its own trainer name, since the scheduler returns the same
batch again to a trainer that holds one.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from forge.client.scheduler import leads
from forge.core.errors import DataLoss, ForgeError, NotFound, Unavailable
from forge.core.prefix_tree import Sample
from forge.rl.learner.batch_plan import BatchPlan
from forge.runtime.concurrency.backoff import Backoff
from forge.runtime.concurrency.tasks import cancel_and_wait, first_done
from forge.runtime.rpc.chunks import Joiner
from forge.runtime.rpc.remote import Remote
from forge.runtime.rpc.streams import flowing
from forge.runtime.telemetry import log
from forge.v1 import common_pb2, pool_pb2, pool_pb2_grpc, scheduler_pb2, scheduler_pb2_grpc
from services.trainer.data.samples import BatchSamples, CreditRules, build_samples

Planner = Callable[[Sequence[Sample]], BatchPlan]

_CALL_S = 30.0
_SILENCE_S = 30.0
"""Longest pause in the middle of a fetch; a long fetch has no other deadline."""
_LEASE_WAIT_S = 5.0
_HURRIED_S = 3.0
"""Longest duration of a call once the process is stopping."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSettings:
    """How batches are leased."""

    trainer_id: str
    max_groups: int
    """0: the scheduler's setting."""
    patience_s: float
    """Longest wait for an unreachable scheduler or pool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A leased batch, renewed until it is committed or released."""

    batch_id: str
    task_ids: tuple[str, ...]
    renewal: asyncio.Task[None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedBatch:
    """A claimed batch, ready for the learner."""

    claim: Claim
    samples: BatchSamples
    plan: BatchPlan


class _Unreadable(Exception):
    """Trajectories that the pool cannot read: the error of each, by id."""

    def __init__(self, lost: Mapping[str, str]) -> None:
        super().__init__(next(iter(lost.values())))
        self.lost = lost


class BatchSource:
    """Prepares batches, one ahead of training."""

    def __init__(
        self,
        scheduler: Remote[scheduler_pb2_grpc.SchedulerServiceStub],
        pool: Remote[pool_pb2_grpc.PoolServiceStub],
        *,
        plan: Planner,
        rules: CreditRules,
        baselines_s: Callable[[], Mapping[str, float]],
        settings: SourceSettings,
    ) -> None:
        """`baselines_s` returns the usual completion time of each domain so far."""
        self._scheduler = scheduler
        self._pool = pool
        self._plan = plan
        self._rules = rules
        self._baselines_s = baselines_s
        self._settings = settings
        self._names = itertools.cycle(f"{settings.trainer_id}#{slot}" for slot in range(2))
        self._renewals: set[asyncio.Task[None]] = set()
        self._taken: dict[str, Claim] = {}
        """Leases of batches in training by id: a new leader must not lease them again."""
        self._next: asyncio.Task[PreparedBatch] | None = None
        self._hurried = asyncio.Event()

    def hurry(self) -> None:
        """Stop waiting for the scheduler: the process is stopping."""
        self._hurried.set()

    async def take_batch(self, *, wait_s: float) -> PreparedBatch | None:
        """The next batch, or None if it is not ready within `wait_s`.

        Raises the error of its preparation: `Unavailable` after `patience_s`.
        """
        preparing = self.prepare()
        await asyncio.wait({preparing}, timeout=wait_s)
        if not preparing.done():
            return None
        self._next = None
        batch = preparing.result()
        self._taken[batch.claim.batch_id] = batch.claim
        return batch

    def prepare(self) -> asyncio.Task[PreparedBatch]:
        """Begin to prepare the next batch for `take`, unless this has begun."""
        if self._next is None:
            # Baselines are read now, so that they do not depend on the duration of preparing.
            preparing = self._prepare(next(self._names), self._baselines_s())
            self._next = asyncio.create_task(preparing)
        return self._next

    async def commit(self, claim: Claim, *, step: int) -> None:
        """Commit that `step` trained the batch.

        Raises `NotFound` or `FailedPrecondition` when it is refused: discard the step.
        """
        request = scheduler_pb2.CommitBatchRequest(
            batch_id=claim.batch_id, step=step, task_ids=claim.task_ids
        )
        await self._call("CommitBatch", request)
        self._done(claim)

    async def tombstone(self, claim: Claim, reason: str, *, task_ids: Sequence[str] = ()) -> None:
        """Tombstone the batch, or the groups `task_ids` of it, and release the others."""
        request = scheduler_pb2.ReleaseBatchRequest(
            batch_id=claim.batch_id, reason=reason, task_ids=task_ids
        )
        await self._call("ReleaseBatch", request)
        self._done(claim)

    async def trained_groups(self) -> int:
        """Number of trained groups in the queue."""
        request = scheduler_pb2.GetSchedulerStatusRequest()
        return int((await self._call("GetSchedulerStatus", request)).trained)

    async def rewind(self, step: int, *, fence: int) -> None:
        """Make groups trained after `step` visible again, and drop all leases. Raises
        `FailedPrecondition` if a trainer with a higher fence did it before."""
        await self.drop()
        request = scheduler_pb2.RewindRequest(step=step, fence=fence)
        answer = await self._call("Rewind", request)
        log.info("rewound", step=step, groups=answer.groups)

    async def release(self) -> None:
        """Release the batch that was prepared and not taken."""
        ready = self._next
        await self.drop()
        if ready is not None and not ready.cancelled() and ready.exception() is None:
            batch_id = ready.result().claim.batch_id
            request = scheduler_pb2.ReleaseBatchRequest(batch_id=batch_id)
            await self._scheduler.call("ReleaseBatch", request, timeout_s=_CALL_S, where=leads)

    async def drop(self) -> None:
        """Stop preparing and renewing; leases then expire."""
        pending: set[asyncio.Task[Any]] = {*self._renewals}
        if self._next is not None:
            pending.add(self._next)
        self._next = None
        self._taken.clear()
        await cancel_and_wait(*pending)

    async def _prepare(self, name: str, baselines_s: Mapping[str, float]) -> PreparedBatch:
        while True:
            lease = await self._lease(name)
            claim = Claim(
                batch_id=lease.batch_id,
                task_ids=tuple(group.group.task.task_id for group in lease.groups),
                renewal=self._renewing(lease),
            )
            try:
                return await self._prepared(claim, lease.groups, baselines_s)
            except _Unreadable as error:
                # The data is lost for good: train the other groups.
                groups = _groups_with(error.lost, lease.groups)
                log.error(
                    "groups_unreadable", batch_id=claim.batch_id, groups=groups, error=str(error)
                )
                await self.tombstone(claim, f"data loss: {error}", task_ids=groups)
            except BaseException:
                claim.renewal.cancel()
                raise

    async def _prepared(
        self,
        claim: Claim,
        groups: Sequence[scheduler_pb2.BatchGroup],
        baselines_s: Mapping[str, float],
    ) -> PreparedBatch:
        trajectories = await self._fetch(groups)
        samples = await asyncio.to_thread(
            build_samples, trajectories, self._rules, baselines_s=baselines_s
        )
        plan = await asyncio.to_thread(self._plan, samples.samples)
        return PreparedBatch(claim=claim, samples=samples, plan=plan)

    async def _lease(self, name: str) -> scheduler_pb2.LeaseBatchResponse:
        while True:
            request = scheduler_pb2.LeaseBatchRequest(
                trainer_id=name,
                max_groups=self._settings.max_groups,
                wait_s=_LEASE_WAIT_S,
                held=[
                    scheduler_pb2.HeldBatch(batch_id=claim.batch_id, task_ids=claim.task_ids)
                    for claim in self._taken.values()
                ],
            )
            answer: scheduler_pb2.LeaseBatchResponse = await self._call("LeaseBatch", request)
            if answer.batch_id:
                return answer

    def _done(self, claim: Claim) -> None:
        self._taken.pop(claim.batch_id, None)
        claim.renewal.cancel()

    def _renewing(self, lease: scheduler_pb2.LeaseBatchResponse) -> asyncio.Task[None]:
        task = asyncio.create_task(self._renew(lease.batch_id, lease.lease_s / 3))
        self._renewals.add(task)
        task.add_done_callback(self._renewals.discard)
        return task

    async def _renew(self, batch_id: str, every_s: float) -> None:
        request = scheduler_pb2.RenewBatchRequest(batch_id=batch_id)
        while True:
            await asyncio.sleep(every_s)
            try:
                await self._scheduler.call(
                    "RenewBatch", request, timeout_s=_CALL_S, retry_for_s=every_s, where=leads
                )
            except NotFound:
                # A new scheduler leader does not know the lease; the commit names the groups.
                log.warning("batch_claim_lost", batch_id=batch_id)
                return
            except ForgeError as error:
                log.warning("batch_not_renewed", batch_id=batch_id, error=str(error))

    async def _fetch(
        self, groups: Sequence[scheduler_pb2.BatchGroup]
    ) -> list[list[common_pb2.Trajectory]]:
        wanted: dict[str, list[str]] = {}
        for group in groups:
            wanted.setdefault(group.group.pool_shard, []).extend(_sealed(group))
        lost: dict[str, str] = {}
        shards = await asyncio.gather(
            *(self._fetch_shard(shard, ids, lost) for shard, ids in wanted.items())
        )
        if lost:
            raise _Unreadable(lost)
        found = {key: value for shard in shards for key, value in shard.items()}
        return [[found[trajectory_id] for trajectory_id in _sealed(group)] for group in groups]

    async def _fetch_shard(
        self, shard: str, trajectory_ids: Sequence[str], lost: dict[str, str]
    ) -> dict[str, common_pb2.Trajectory]:
        """Fetch all trajectories, with a new stream after each failure for those still missing.

        Unreadable trajectories are entered in `lost`; the others are fetched nevertheless.
        """
        found: dict[str, common_pb2.Trajectory] = {}
        together = len(trajectory_ids)
        loop = asyncio.get_running_loop()
        give_up_s = loop.time() + self._settings.patience_s
        backoff = Backoff(0.1, 5.0)
        while missing := [i for i in trajectory_ids if i not in found and i not in lost]:
            asked = missing[:together]
            together = len(trajectory_ids)
            try:
                await self._stream(shard, asked, found)
            except (NotFound, DataLoss) as error:
                if len(asked) == 1:
                    lost[asked[0]] = str(error)
                else:
                    # One bad trajectory fails the whole page: fetch them one by one to find it.
                    together = 1
            except ForgeError as error:
                if not error.retryable or loop.time() > give_up_s:
                    raise
                log.warning("fetch_retried", shard=shard, error=str(error))
                await asyncio.sleep(backoff.next_s())
        return found

    async def _stream(
        self, shard: str, trajectory_ids: Sequence[str], found: dict[str, common_pb2.Trajectory]
    ) -> None:
        _, stub = await self._pool.pick(
            where=lambda instance: instance.metadata.get("shard") == shard, timeout_s=_CALL_S
        )
        request = pool_pb2.FetchTrajectoriesRequest(trajectory_ids=trajectory_ids)
        joiner = Joiner()
        # The stub's own type knows only blocking streams.
        stream: Any = stub.FetchTrajectories(request)
        async for response in flowing(stream, silence_s=_SILENCE_S, source=f"pool shard {shard}"):
            whole = joiner.add(response.trajectory)
            if whole is not None:
                found[response.trajectory_id] = common_pb2.Trajectory.FromString(whole)

    async def _call(self, method: str, request: Any) -> Any:
        call = asyncio.ensure_future(
            self._scheduler.call(
                method,
                request,
                timeout_s=_CALL_S,
                retry_for_s=self._settings.patience_s,
                where=leads,
            )
        )
        if call not in await first_done(call, self._hurried_end()):
            raise Unavailable(f"no response to {method} from the scheduler before the stop")
        return call.result()

    async def _hurried_end(self) -> None:
        await self._hurried.wait()
        await asyncio.sleep(_HURRIED_S)


def _groups_with(lost: Mapping[str, str], groups: Sequence[scheduler_pb2.BatchGroup]) -> list[str]:
    """Task ids of the groups that have a lost trajectory."""
    return [
        group.group.task.task_id
        for group in groups
        if any(trajectory_id in lost for trajectory_id in _sealed(group))
    ]


def _sealed(group: scheduler_pb2.BatchGroup) -> list[str]:
    return [
        summary.trajectory_id
        for summary in group.trajectories
        if summary.state == common_pb2.TRAJECTORY_STATE_SEALED
    ]
