"""Keeps as many rollouts going as it may, and tells the scheduler how each ended.

Owns the leases: it asks for work, has what it holds renewed (`forge.agents.claim_renewal`), stops
what it lost, and reports what ended, in batches. What a rollout is, `forge.agents.attempts` knows.

A scheduler that is away stops nothing: rollouts go on, and their outcomes wait here, still
holding their place, until they could be reported. Every attempt writes a trajectory of its own, so
one that goes on after its claim had passed to another runner can spoil nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from forge.agents.claim_renewal import ClaimRenewal, Renew
from forge.core.errors import ForgeError, PermissionDenied, Unauthenticated
from forge.runtime.telemetry import counter, gauge, histogram, log
from forge.v1 import scheduler_pb2 as pb

Outcome = pb.FinishRolloutsRequest.Outcome

REPORT_BATCH = 256
CALL_S = 10.0
PAUSE_S = 1.0
"""Before a call that failed is made again."""

_ROLLOUTS = counter("forge_runner_rollouts_total", "Rollouts that ended.", ["result"])
_RUNNING = gauge("forge_runner_rollouts_running", "Rollouts that are being attempted.")
_DURATION = histogram(
    "forge_runner_rollout_seconds",
    "Time from lease to end.",
    buckets=(0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000, 3600),
)


class Scheduler(Protocol):
    """The scheduler's leader, wherever it is; raises `ForgeError`."""

    async def __call__(self, method: str, request: Any, *, timeout_s: float) -> Any: ...


@dataclass(slots=True, kw_only=True)
class _Held:
    """A claim, from the lease until its outcome is reported."""

    lease: pb.RolloutLease
    task: asyncio.Task[Outcome]


class Runner:
    """Up to `concurrency` rollouts at once."""

    def __init__(
        self,
        *,
        runner_id: str,
        scheduler: Scheduler,
        renew: Renew,
        attempt: Callable[[pb.RolloutLease], Coroutine[Any, Any, Outcome]],
        concurrency: int,
        lease_wait_s: float,
        patience_s: float,
    ) -> None:
        """`patience_s`: claims are renewed for so long while the event loop is blocked."""
        self._runner_id = runner_id
        self._scheduler = scheduler
        self._attempt = attempt
        self._concurrency = concurrency
        self._lease_wait_s = lease_wait_s
        self._held: dict[str, _Held] = {}
        self._ended: asyncio.Queue[Outcome] = asyncio.Queue()
        """To be reported; each still holds its place, so there are never more than that."""
        self._changed = asyncio.Event()
        """Set whenever a claim came or went."""
        self._renewal = ClaimRenewal(renew, on_lost=self._stop_lost, patience_s=patience_s)
        self._draining = False
        self._tasks: asyncio.TaskGroup
        self._leasing: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Work until drained."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            self._leasing = tasks.create_task(self._lease_work())
            renewing = tasks.create_task(self._renewal.run())
            reporting = tasks.create_task(self._report_outcomes())
            await asyncio.wait([self._leasing])
            while self._held:
                await self._change()
            renewing.cancel()
            reporting.cancel()

    def renew_now(self) -> None:
        """A new leader knows a claim once it is renewed, and does not wait for long."""
        self._renewal.renew_now()

    async def drain(self, *, patience_s: float) -> None:
        """Take no more work; let what runs end, stop what takes longer than `patience_s`."""
        self._draining = True
        try:
            async with asyncio.timeout(patience_s):
                await self._leave()
                while self._held:
                    await self._change()
        except TimeoutError:
            log.info("rollouts_stopped", running=len(self._held))
            for held in self._held.values():
                held.task.cancel()
        finally:
            if self._leasing is not None:
                self._leasing.cancel()

    async def _leave(self) -> None:
        """Have the call that waits for work answered, not cancelled: it may have been given some,
        which would then be nobody's until its claim expires."""
        self._changed.set()
        if self._leasing is None or self._leasing.done():
            return
        request = pb.LeaseRolloutsRequest(runner_id=self._runner_id, leaving=True)
        try:
            await self._scheduler("LeaseRollouts", request, timeout_s=CALL_S)
        except ForgeError as error:
            log.info("left_without_a_word", error=str(error))
            return
        await asyncio.wait([self._leasing], timeout=CALL_S)

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    async def _lease_work(self) -> None:
        while not self._draining:
            free = self._concurrency - len(self._held)
            if free == 0:
                await self._change()
                continue
            request = pb.LeaseRolloutsRequest(
                runner_id=self._runner_id, max_rollouts=free, wait_s=self._lease_wait_s
            )
            response = await self._ask("LeaseRollouts", request, self._lease_wait_s + CALL_S)
            for lease in response.leases if response else ():
                self._start(lease)

    def _start(self, lease: pb.RolloutLease) -> None:
        if lease.lease_id in self._held:
            return
        task = self._tasks.create_task(self._attempt(lease), name=lease.trajectory_id)
        self._held[lease.lease_id] = _Held(lease=lease, task=task)
        self._renewal.add(lease.lease_id, lease_s=lease.lease_s)
        _RUNNING.inc()
        # A callback, not a wrapper: one that is cancelled before its first step ends too.
        task.add_done_callback(partial(self._end, lease, time.monotonic()))
        self._changed.set()

    def _end(self, lease: pb.RolloutLease, began_s: float, task: asyncio.Task[Outcome]) -> None:
        """Hand the outcome over; its place is free once that is reported."""
        _RUNNING.dec()
        _DURATION.observe(time.monotonic() - began_s)
        if task.cancelled():
            outcome = Outcome(
                lease_id=lease.lease_id,
                trajectory_id=lease.trajectory_id,
                error="the runner was stopped",
                kind=pb.FAILURE_KIND_INFRASTRUCTURE,
            )
        elif task.exception() is not None:
            # A bug of ours: the task group is ending the runner with it.
            return
        else:
            outcome = task.result()
        _ROLLOUTS.labels("failed" if outcome.error else "sealed").inc()
        if outcome.error:
            log.warning(
                "rollout_failed",
                trajectory_id=lease.trajectory_id,
                error=outcome.error,
                permanent=outcome.permanent,
                kind=pb.FailureKind.Name(outcome.kind).removeprefix("FAILURE_KIND_").lower(),
            )
        # A lost claim is no longer held: there is nobody to report to.
        if lease.lease_id in self._held:
            self._ended.put_nowait(outcome)

    async def _report_outcomes(self) -> None:
        while True:
            outcomes = [await self._ended.get()]
            while not self._ended.empty() and len(outcomes) < REPORT_BATCH:
                outcomes.append(self._ended.get_nowait())
            await self._finish(pb.FinishRolloutsRequest(outcomes=outcomes))
            self._release([outcome.lease_id for outcome in outcomes])

    async def _finish(self, request: pb.FinishRolloutsRequest) -> None:
        """Report for as long as it takes; claims are renewed meanwhile."""
        while True:
            try:
                await self._scheduler("FinishRollouts", request, timeout_s=CALL_S)
                return
            except ForgeError as error:
                if not error.retryable:
                    # Left alone, the claims expire, and the scheduler looks for itself.
                    log.error("outcomes_refused", error=str(error))
                    return
                log.warning("scheduler_away", method="FinishRollouts", error=str(error))
            await asyncio.sleep(PAUSE_S)

    def _stop_lost(self, lease_ids: Sequence[str]) -> None:
        for lease_id in lease_ids:
            if held := self._held.get(lease_id):
                log.warning("claim_lost", trajectory_id=held.lease.trajectory_id)
                held.task.cancel()
        self._release(lease_ids)

    def _release(self, lease_ids: Sequence[str]) -> None:
        self._renewal.drop(lease_ids)
        for lease_id in lease_ids:
            self._held.pop(lease_id, None)
        self._changed.set()

    async def _ask(self, method: str, request: Any, timeout_s: float) -> Any | None:
        """The scheduler's answer; None, after a pause, when there was none.

        Raises `Unauthenticated` and `PermissionDenied`: no waiting mends a wrong key.
        """
        try:
            return await self._scheduler(method, request, timeout_s=timeout_s)
        except (Unauthenticated, PermissionDenied):
            raise
        except ForgeError as error:
            log.warning("scheduler_away", method=method, error=str(error))
            await asyncio.sleep(PAUSE_S)
            return None
