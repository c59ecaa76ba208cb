"""Leases batches and lets the next one be read and planned during the current step.

Owns the leases of batches: lease, renewal, commit and release; and the refill of a batch, which
leases more groups in place of flat ones. One batch is prepared ahead of the one in training. Each
lease has its own trainer name, since the scheduler returns the same batch again to a trainer that
holds one.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from forge.client.scheduler import leads
from forge.core.errors import DeadlineExceeded, ForgeError, NotFound, Unavailable
from forge.rl.learner.batch_plan import BatchPlan
from forge.runtime.concurrency.tasks import cancel_and_wait, first_done
from forge.runtime.rpc.remote import Remote
from forge.runtime.telemetry import log
from forge.v1 import scheduler_pb2, scheduler_pb2_grpc
from services.trainer.batches.logged_rollouts import LoggedRollout
from services.trainer.batches.reading import BatchDraft, BatchReading, ReadBatch
from services.trainer.batches.trajectory_fetch import Unreadable
from services.trainer.samples.samples import BatchSamples

_CALL_S = 30.0
_LEASE_WAIT_S = 5.0
LATE_S = 1.0
"""After the end of the wait for groups of a refill, for the answer."""
_HURRIED_S = 3.0
"""Longest duration of a call once the process is stopping."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSettings:
    """Settings of batch leases."""

    trainer_id: str
    max_groups: int
    """0: the scheduler's setting."""
    patience_s: float
    """Longest wait for an unreachable scheduler or pool."""
    refill_groups: int = 0
    """Most groups of a batch that replace flat ones; 0: none does."""
    refill_wait_s: float = 0.0
    """Longest wait for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasedBatch:
    """A leased batch, renewed until it is committed or released."""

    batch_id: str
    task_ids: tuple[str, ...]
    renewal: asyncio.Task[None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedBatch:
    """A claimed batch, ready for the learner."""

    claim: LeasedBatch
    refills: tuple[LeasedBatch, ...] = ()
    """Claims of the groups that replace flat ones."""
    samples: BatchSamples
    plan: BatchPlan | ReadBatch
    traceparents: tuple[str, ...] = ()
    """Contexts of the traced rollouts of the batch, one for each trace."""
    rollouts: tuple[LoggedRollout, ...] = ()
    """Rows for trackers of experiments."""

    @property
    def claims(self) -> tuple[LeasedBatch, ...]:
        """All claims: a step commits each of them."""
        return (self.claim, *self.refills)

    @property
    def task_ids(self) -> tuple[str, ...]:
        """The tasks of all claims."""
        return tuple(task_id for claim in self.claims for task_id in claim.task_ids)


class BatchSource:
    """Prepares batches, one ahead of training."""

    def __init__(
        self,
        scheduler: Remote[scheduler_pb2_grpc.SchedulerServiceStub],
        reading: BatchReading,
        *,
        baselines_s: Callable[[], Mapping[str, float]],
        settings: SourceSettings,
    ) -> None:
        """`baselines_s` returns the usual completion time of each domain so far."""
        self._scheduler = scheduler
        self._reading = reading
        self._baselines_s = baselines_s
        self._settings = settings
        self._names = itertools.cycle(f"{settings.trainer_id}#{slot}" for slot in range(2))
        self._renewals: set[asyncio.Task[None]] = set()
        self._taken: dict[str, LeasedBatch] = {}
        """Leases of batches in training by id: a new leader must not lease them again."""
        self._next: asyncio.Task[PreparedBatch] | None = None
        self._hurried = asyncio.Event()

    def hurry(self) -> None:
        """Stop waiting for the scheduler: the process is stopping."""
        self._hurried.set()

    async def take_batch(self, *, wait_s: float) -> PreparedBatch | None:
        """Return the next batch, or None if it is not ready within `wait_s`.

        Raises the error of its preparation: `Unavailable` after `patience_s`.
        """
        preparing = self.prepare()
        await asyncio.wait({preparing}, timeout=wait_s)
        if not preparing.done():
            return None
        self._next = None
        batch = preparing.result()
        self._taken.update({claim.batch_id: claim for claim in batch.claims})
        return batch

    def prepare(self) -> asyncio.Task[PreparedBatch]:
        """Begin to prepare the next batch for `take`, unless this has begun."""
        if self._next is None:
            # Baselines are read now, so that they do not depend on the duration of preparing.
            preparing = self._prepare(next(self._names), self._baselines_s())
            self._next = asyncio.create_task(preparing)
        return self._next

    async def commit(self, claim: LeasedBatch, *, step: int) -> None:
        """Commit that `step` trained the batch.

        Raises `NotFound` or `FailedPrecondition` when it is refused: discard the step.
        """
        request = scheduler_pb2.CommitBatchRequest(
            batch_id=claim.batch_id, step=step, task_ids=claim.task_ids
        )
        await self._call("CommitBatch", request)
        self._done(claim)

    async def tombstone(
        self, claim: LeasedBatch, reason: str, *, task_ids: Sequence[str] = ()
    ) -> None:
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
            for claim in ready.result().claims:
                request = scheduler_pb2.ReleaseBatchRequest(batch_id=claim.batch_id)
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
        draft, claims = self._reading.begin(baselines_s), list[LeasedBatch]()
        try:
            while not claims:
                lease = await self._lease(name, max_groups=self._settings.max_groups)
                assert lease is not None, "this lease was awaited without a limit"
                await self._claim(lease, draft, claims)
            samples = await self._refilled(name, draft, claims)
            planned = await draft.planned()
        except BaseException:
            for claim in claims:
                claim.renewal.cancel()
            raise
        first, *refills = claims
        return PreparedBatch(
            claim=first,
            refills=tuple(refills),
            samples=samples,
            plan=planned.plan,
            rollouts=planned.rollouts,
            traceparents=planned.traceparents,
        )

    async def _refilled(
        self, name: str, draft: BatchDraft, claims: list[LeasedBatch]
    ) -> BatchSamples:
        """The batch, with further groups in place of flat ones."""
        samples, own = await draft.samples(), draft.groups
        until_s = asyncio.get_running_loop().time() + self._settings.refill_wait_s
        for number in itertools.count(1):
            missing = own - (samples.groups - samples.flat_groups)
            left = self._settings.refill_groups - (draft.groups - own)
            if min(missing, left) < 1:
                break
            lease = await self._lease(
                f"{name}.{number}", max_groups=min(missing, left), held=claims, until_s=until_s
            )
            if lease is None:
                break
            await self._claim(lease, draft, claims)
            samples = await draft.samples()
        return replace(samples, refill_groups=draft.groups - own)

    async def _claim(
        self, lease: scheduler_pb2.LeaseBatchResponse, draft: BatchDraft, claims: list[LeasedBatch]
    ) -> None:
        """Add the leased groups to the draft, or tombstone those that the pool cannot read and
        return the others."""
        claim = LeasedBatch(
            batch_id=lease.batch_id,
            task_ids=tuple(group.group.task.task_id for group in lease.groups),
            renewal=self._renewing(lease),
        )
        try:
            await draft.add(lease.groups)
            claims.append(claim)
        except Unreadable as error:
            # The data is lost for good: train the other groups.
            groups = error.groups_among(lease.groups)
            log.error("groups_unreadable", batch_id=claim.batch_id, groups=groups, error=str(error))
            await self.tombstone(claim, f"data loss: {error}", task_ids=groups)
        except BaseException:
            claim.renewal.cancel()
            raise

    async def _lease(
        self,
        name: str,
        *,
        max_groups: int,
        held: Sequence[LeasedBatch] = (),
        until_s: float = math.inf,
    ) -> scheduler_pb2.LeaseBatchResponse | None:
        """A batch, or None if there is none by `until_s` of the loop's clock, also if the scheduler
        does not answer. `held` are claims of the batch that it is for."""
        loop = asyncio.get_running_loop()
        while True:
            request = scheduler_pb2.LeaseBatchRequest(
                trainer_id=name,
                max_groups=max_groups,
                wait_s=max(0.0, min(_LEASE_WAIT_S, until_s - loop.time())),
                first_group=0,
                held=[
                    scheduler_pb2.HeldBatch(batch_id=claim.batch_id, task_ids=claim.task_ids)
                    for claim in (*self._taken.values(), *held)
                ],
            )
            try:
                async with asyncio.timeout_at(until_s + LATE_S if until_s < math.inf else None):
                    answer = await self._all_pages(request)
            except (Unavailable, DeadlineExceeded, TimeoutError) as error:
                if until_s == math.inf or self._hurried.is_set():
                    raise
                log.warning("refill_ended", error=str(error) or "no answer in time")
                return None
            if answer is not None and answer.batch_id:
                return answer
            if loop.time() >= until_s:
                return None

    async def _all_pages(
        self, request: scheduler_pb2.LeaseBatchRequest
    ) -> scheduler_pb2.LeaseBatchResponse | None:
        """The answer with the groups of all pages; None if another batch took the place of this one
        meanwhile."""
        answer = cast(scheduler_pb2.LeaseBatchResponse, await self._call("LeaseBatch", request))
        while len(answer.groups) < answer.total_groups:
            following = scheduler_pb2.LeaseBatchRequest()
            following.CopyFrom(request)
            following.first_group, following.wait_s = len(answer.groups), 0.0
            page = await self._call("LeaseBatch", following)
            same = (page.batch_id, page.total_groups) == (answer.batch_id, answer.total_groups)
            if not same or not page.groups:
                log.warning("batch_lease_changed", batch_id=answer.batch_id)
                return None
            answer.groups.extend(page.groups)
        return answer

    def _done(self, claim: LeasedBatch) -> None:
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
