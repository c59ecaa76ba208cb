"""Runs leased rollouts up to a limit and reports their results to the scheduler.

Owns the task leases: requests them, adds them to the renewal (`forge.agents.lease_renewal`), stops
rollouts with a lost lease, and reports results in batches. `forge.agents.attempts` runs a rollout.

An unreachable scheduler stops no rollout. Results wait here until they are reported, and count
towards the limit until then. Each attempt writes its own trajectory, so an attempt that continues
after its lease passed to another runner does no harm.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from forge.agents.lease_renewal import LeaseRenewal, Renew
from forge.agents.rollout import RolloutResult
from forge.core.enum_words import enum_word
from forge.core.errors import ForgeError, PermissionDenied, Unauthenticated
from forge.runtime.process.drain import DRAINING
from forge.runtime.telemetry import counter, gauge, histogram, log
from forge.v1 import scheduler_pb2 as pb

REPORT_BATCH = 256
CALL_S = 10.0
PAUSE_S = 1.0
"""Pause before a failed call is repeated."""

_ROLLOUTS = counter(
    "forge_runner_rollouts_total", "Ended rollouts, by result: sealed, failed.", ["result"]
)
_RUNNING = gauge("forge_runner_rollouts_running", "Running rollouts.")
_DURATION = histogram(
    "forge_runner_rollout_seconds",
    "Time from the lease of a rollout to its end.",
    buckets=(0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000, 3600),
)


class Scheduler(Protocol):
    """Calls the current leader of the scheduler; raises `ForgeError`."""

    async def __call__(self, method: str, request: Any, *, timeout_s: float) -> Any:
        """Returns the response of one RPC."""


@dataclass(slots=True, kw_only=True)
class _LeasedRollout:
    """A rollout from its lease to the report of its result."""

    lease: pb.RolloutLease
    task: asyncio.Task[RolloutResult]


class Runner:
    """Runs up to `concurrency` rollouts at once."""

    def __init__(
        self,
        *,
        identity: Callable[[], pb.LeaseRolloutsRequest],
        scheduler: Scheduler,
        renew: Renew,
        attempt: Callable[[pb.RolloutLease], Coroutine[Any, Any, RolloutResult]],
        concurrency: int,
        lease_wait_s: float,
        patience_s: float,
    ) -> None:
        """`identity` returns id, domains and scaffolds of the runner. `patience_s`: time for which
        leases are renewed while the event loop is blocked."""
        self._identity = identity
        self._scheduler = scheduler
        self._attempt = attempt
        self._concurrency = concurrency
        self._lease_wait_s = lease_wait_s
        self._leased: dict[str, _LeasedRollout] = {}
        """By lease id."""
        self._ended: asyncio.Queue[RolloutResult] = asyncio.Queue()
        """Results to report; their rollouts still count towards the limit, so this is bounded."""
        self._changed = asyncio.Event()
        """Set after each change of `_leased`."""
        self._renewal = LeaseRenewal(renew, on_lost=self._stop_lost, patience_s=patience_s)
        self._draining = False
        self._drained = False
        """By an operator, as the scheduler says: it leases nothing to this runner."""
        self._tasks: asyncio.TaskGroup
        self._leasing: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Runs rollouts until drained."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            self._leasing = tasks.create_task(self._lease_work())
            renewing = tasks.create_task(self._renewal.run())
            reporting = tasks.create_task(self._report_results())
            await asyncio.wait([self._leasing])
            while self._leased:
                await self._change()
            renewing.cancel()
            reporting.cancel()

    def renew_now(self) -> None:
        """Renews all leases, for a new leader, which waits for them only a short time."""
        self._renewal.renew_now()

    async def drain(self, *, patience_s: float) -> None:
        """Leases no more rollouts; waits for running ones, and stops them after `patience_s`."""
        self._draining = True
        try:
            async with asyncio.timeout(patience_s):
                await self._leave()
                while self._leased:
                    await self._change()
        except TimeoutError:
            log.info("rollouts_stopped", running=len(self._leased))
            for rollout in self._leased.values():
                rollout.task.cancel()
        finally:
            if self._leasing is not None:
                self._leasing.cancel()

    async def _leave(self) -> None:
        self._changed.set()
        if self._leasing is None or self._leasing.done():
            return
        # The scheduler answers the waiting LeaseRollouts call. A cancel instead could lose leases
        # that were just granted, until they expire.
        try:
            request = pb.LeaseRolloutsRequest(runner_id=self._identity().runner_id, leaving=True)
            await self._scheduler("LeaseRollouts", request, timeout_s=CALL_S)
        except ForgeError as error:
            log.info("leave_failed", error=str(error))
            return
        await asyncio.wait([self._leasing], timeout=CALL_S)

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    async def _lease_work(self) -> None:
        while not self._draining:
            free = self._concurrency - len(self._leased)
            if free == 0:
                await self._change()
                continue
            request = pb.LeaseRolloutsRequest(max_rollouts=free, wait_s=self._lease_wait_s)
            request.MergeFrom(self._identity())
            response = await self._lease(request)
            if response is None:
                continue
            self._note_drain(response.draining)
            for lease in response.leases:
                self._start(lease)

    def _note_drain(self, drained: bool) -> None:
        if drained != self._drained:
            self._drained = drained
            DRAINING.set(drained)
            log.info("drain_begun" if drained else "drain_ended", running=len(self._leased))

    def _start(self, lease: pb.RolloutLease) -> None:
        if lease.lease_id in self._leased:
            return
        task = self._tasks.create_task(self._attempt(lease), name=lease.trajectory_id)
        self._leased[lease.lease_id] = _LeasedRollout(lease=lease, task=task)
        self._renewal.add(lease.lease_id, lease_s=lease.lease_s)
        _RUNNING.inc()
        # A callback, not a wrapper: it also runs for a task cancelled before its first step.
        task.add_done_callback(partial(self._end, lease, time.monotonic()))
        self._changed.set()

    def _end(
        self, lease: pb.RolloutLease, began_s: float, task: asyncio.Task[RolloutResult]
    ) -> None:
        """Queues the result; the rollout counts towards the limit until the report."""
        _RUNNING.dec()
        _DURATION.observe(time.monotonic() - began_s)
        if task.cancelled():
            is_leased = lease.lease_id in self._leased
            result = RolloutResult(
                lease_id=lease.lease_id,
                trajectory_id=lease.trajectory_id,
                error="the runner was stopped" if is_leased else "its lease was lost",
                kind=pb.FAILURE_KIND_INFRASTRUCTURE,
            )
        elif task.exception() is not None:
            # A bug of Forge: the task group ends the runner with this error.
            return
        else:
            result = task.result()
        _ROLLOUTS.labels("failed" if result.error else "sealed").inc()
        if result.error:
            log.warning(
                "rollout_failed",
                trajectory_id=lease.trajectory_id,
                error=result.error,
                permanent=result.permanent,
                kind=enum_word(pb.FailureKind, result.kind),
            )
        # A rollout with a lost lease is not reported.
        if lease.lease_id in self._leased:
            self._ended.put_nowait(result)

    async def _report_results(self) -> None:
        """Reports results with retries; the leases are renewed until then."""
        results: list[RolloutResult] = []
        while True:
            results += [] if results else [await self._ended.get()]
            # Also after a failed call: the scheduler settles those whose pool shards answer.
            while not self._ended.empty() and len(results) < REPORT_BATCH:
                results.append(self._ended.get_nowait())
            if await self._report(results):
                self._release([result.lease_id for result in results])
                results = []
            else:
                await asyncio.sleep(PAUSE_S)

    async def _report(self, results: Sequence[RolloutResult]) -> bool:
        """False if the results have to be reported again."""
        request = pb.FinishRolloutsRequest(outcomes=results)
        try:
            response = await self._scheduler("FinishRollouts", request, timeout_s=CALL_S)
        except ForgeError as error:
            if error.retryable:
                log.warning("scheduler_unreachable", method="FinishRollouts", error=str(error))
                return False
            # The leases expire, and the scheduler checks the trajectories itself.
            log.error("results_refused", error=str(error))
            return True
        for refusal in response.refused:
            log.error("result_refused", trajectory_id=refusal.trajectory_id, error=refusal.error)
        return True

    def _stop_lost(self, lease_ids: Sequence[str]) -> None:
        lost = [one for lease_id in lease_ids if (one := self._leased.get(lease_id))]
        # A rollout that has ended keeps its place until the report, which ends its lease: the
        # scheduler may have the report before this runner has the response.
        running = [one for one in lost if not one.task.done()]
        for rollout in running:
            log.warning("lease_lost", trajectory_id=rollout.lease.trajectory_id)
            rollout.task.cancel()
        self._release([one.lease.lease_id for one in running])

    def _release(self, lease_ids: Sequence[str]) -> None:
        self._renewal.drop(lease_ids)
        for lease_id in lease_ids:
            self._leased.pop(lease_id, None)
        self._changed.set()

    async def _lease(self, request: pb.LeaseRolloutsRequest) -> Any | None:
        """Returns the scheduler's response; None, after a pause, for a failed call.

        Raises `Unauthenticated` and `PermissionDenied`, which no retry can repair.
        """
        try:
            timeout_s = self._lease_wait_s + CALL_S
            return await self._scheduler("LeaseRollouts", request, timeout_s=timeout_s)
        except (Unauthenticated, PermissionDenied):
            raise
        except ForgeError as error:
            log.warning("scheduler_unreachable", method="LeaseRollouts", error=str(error))
            await asyncio.sleep(PAUSE_S)
            return None
