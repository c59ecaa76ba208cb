"""A runner around a stand-in of the scheduler, and attempts that end when a test says so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from forge.agents.rollout import RolloutResult
from forge.agents.runner import Runner
from forge.v1 import scheduler_pb2 as pb


class StandIn:
    """A scheduler with a list of leases to give out. Made on the event loop."""

    def __init__(self, *leases: pb.RolloutLease) -> None:
        self.waiting = list(leases)
        self.asked: list[int] = []
        self.renewed: asyncio.Queue[list[str]] = asyncio.Queue()
        self.renewals = 0
        """The same for a test that blocks the event loop."""
        self._loop = asyncio.get_running_loop()
        self.lost: list[str] = []
        self.outcomes: dict[str, RolloutResult] = {}
        self.reported = asyncio.Event()
        self.refusals: dict[str, list[Exception]] = {}
        """Raised by the next calls of that method."""
        self.left = asyncio.Event()
        self.draining = False

    async def __call__(self, method: str, request: Any, *, timeout_s: float) -> Any:
        if self.refusals.get(method):
            raise self.refusals[method].pop(0)
        return await getattr(self, method)(request)

    async def LeaseRollouts(self, request: Any) -> Any:
        if request.leaving:
            self.left.set()
            return pb.LeaseRolloutsResponse()
        self.asked.append(request.max_rollouts)
        if not self.waiting:
            await self.left.wait()
        given = self.waiting[: request.max_rollouts]
        del self.waiting[: request.max_rollouts]
        return pb.LeaseRolloutsResponse(leases=given, draining=self.draining)

    def renew(self, lease_ids: Sequence[str]) -> Sequence[str]:
        """Called on a thread."""
        if self.refusals.get("RenewRollouts"):
            raise self.refusals["RenewRollouts"].pop(0)
        self.renewals += 1
        self._loop.call_soon_threadsafe(self.renewed.put_nowait, list(lease_ids))
        return self.lost

    async def FinishRollouts(self, request: Any) -> Any:
        self.outcomes |= {outcome.lease_id: outcome for outcome in request.outcomes}
        self.reported.set()
        return pb.FinishRolloutsResponse()

    def drain(self, draining: bool) -> None:
        """As an operator does; answers the waiting call."""
        self.draining = draining
        self.left.set()
        self.left = asyncio.Event()

    async def until_reported(self, count: int) -> None:
        """Wait until that many rollouts were reported."""
        while len(self.outcomes) < count:
            self.reported.clear()
            await self.reported.wait()


class Work:
    """Attempts that end when the test says so."""

    def __init__(self) -> None:
        self.running: set[str] = set()
        self.most = 0
        self.cancelled: set[str] = set()
        self.go = asyncio.Event()
        self.began: asyncio.Queue[str] = asyncio.Queue()

    async def __call__(self, claim: pb.RolloutLease) -> RolloutResult:
        self.running.add(claim.lease_id)
        self.most = max(self.most, len(self.running))
        self.began.put_nowait(claim.lease_id)
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled.add(claim.lease_id)
            raise
        finally:
            self.running.discard(claim.lease_id)
        return RolloutResult(lease_id=claim.lease_id, trajectory_id=claim.trajectory_id)


def a_runner(
    scheduler: StandIn, work: Any, *, concurrency: int = 1, patience_s: float = 3600.0
) -> Runner:
    return Runner(
        identity=lambda: pb.LeaseRolloutsRequest(runner_id="runner-0", domains=["code"]),
        scheduler=scheduler,
        renew=scheduler.renew,
        attempt=work,
        concurrency=concurrency,
        lease_wait_s=1.0,
        patience_s=patience_s,
    )


@asynccontextmanager
async def working(
    scheduler: StandIn, work: Any, *, concurrency: int = 8, patience_s: float = 3600.0
) -> AsyncIterator[Runner]:
    runner = a_runner(scheduler, work, concurrency=concurrency, patience_s=patience_s)
    running = asyncio.create_task(runner.run())
    yield runner
    await runner.drain(patience_s=0.0)
    await running
