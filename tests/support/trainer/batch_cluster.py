"""A source of batches, around a scheduler and a pool shard in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from forge.core.credit.rewards import RewardWeights
from forge.core.errors import DataLoss, ForgeError
from forge.rl.learner.batch_plan import BatchPlan
from forge.runtime.rpc.chunks import split
from forge.runtime.rpc.remote import Remote
from forge.v1 import common_pb2, pool_pb2, scheduler_pb2
from forge.v1.pool_pb2_grpc import PoolServiceStub
from forge.v1.scheduler_pb2_grpc import SchedulerServiceStub
from services.trainer.batches.batch_source import BatchSource, SourceSettings
from services.trainer.batches.reading import LocalReading
from services.trainer.batches.trajectory_fetch import TrajectoryFetch, shard_in
from services.trainer.samples.credit_rules import CreditRules
from tests.support.pool.records import make_reward, make_turn

RULES = CreditRules(weights=RewardWeights())
HANGS = ForgeError("no answer")


class FakeScheduler(Remote[SchedulerServiceStub]):
    """Hands out batches the way the scheduler does: one per name at a time."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.held: dict[str, str] = {}
        self.available = asyncio.Semaphore(0)
        self.renewed = asyncio.Event()
        self.renewal_fault: ForgeError | None = None
        self.lease_s = 60.0
        self.groups_per_batch = 1
        self.refill_fault: ForgeError | None = None
        """Raised by leases of a refill; `HANGS`: they get no answer."""
        self._issued = 0

    async def call(self, method: str, request: Any, **_: Any) -> Any:
        self.calls.append((method, request))
        if method == "LeaseBatch" and "." in request.trainer_id and self.refill_fault:
            if self.refill_fault is HANGS:
                await asyncio.Event().wait()
            raise self.refill_fault
        return await getattr(self, f"_{method}")(request)

    def asked(self, method: str) -> list[Any]:
        return [request for name, request in self.calls if name == method]

    async def _LeaseBatch(
        self, request: scheduler_pb2.LeaseBatchRequest
    ) -> scheduler_pb2.LeaseBatchResponse:
        if request.trainer_id not in self.held:
            if not request.wait_s and self.available.locked():
                return scheduler_pb2.LeaseBatchResponse()
            await self.available.acquire()
            self.held[request.trainer_id] = f"batch-{self._issued}"
            self._issued += 1
        batch_id = self.held[request.trainer_id]
        return scheduler_pb2.LeaseBatchResponse(
            batch_id=batch_id,
            lease_s=self.lease_s,
            groups=[
                group(batch_id, number)
                for number in range(min(self.groups_per_batch, request.max_groups))
            ],
        )

    async def _RenewBatch(self, _: Any) -> None:
        self.renewed.set()
        if self.renewal_fault is not None:
            raise self.renewal_fault

    async def _CommitBatch(self, request: Any) -> None:
        self._let_go(request.batch_id)

    async def _ReleaseBatch(self, request: Any) -> None:
        self._let_go(request.batch_id)

    async def _Rewind(self, _: Any) -> scheduler_pb2.RewindResponse:
        self.held.clear()
        return scheduler_pb2.RewindResponse()

    def _let_go(self, batch_id: str) -> None:
        self.held = {name: held for name, held in self.held.items() if held != batch_id}


def group(batch_id: str, number: int) -> scheduler_pb2.BatchGroup:
    """Two rollouts that are sealed and one that was abandoned."""
    task_id = f"{batch_id}-task-{number}" if number else f"{batch_id}-task"
    states = (
        common_pb2.TRAJECTORY_STATE_SEALED,
        common_pb2.TRAJECTORY_STATE_ABANDONED,
        common_pb2.TRAJECTORY_STATE_SEALED,
    )
    return scheduler_pb2.BatchGroup(
        group=common_pb2.GroupRecord(task=common_pb2.Task(task_id=task_id), pool_shard="s0"),
        trajectories=[
            common_pb2.TrajectorySummary(trajectory_id=f"{task_id}:{n}:0", state=state)
            for n, state in enumerate(states)
        ],
    )


class FakePool(Remote[PoolServiceStub]):
    """Streams trajectories; a fault cuts the stream after the first, a damaged one before it."""

    def __init__(self) -> None:
        self.fault: ForgeError | None = None
        self.damaged: set[str] = set()
        self.better: set[str] = set()
        """Trajectories with a better outcome than the others."""
        self.silent_after_first = False
        self.fetched: list[list[str]] = []

    async def pick(self, **_: Any) -> tuple[Any, Any]:
        return None, self

    async def FetchTrajectories(
        self, request: pool_pb2.FetchTrajectoriesRequest
    ) -> AsyncIterator[pool_pb2.FetchTrajectoriesResponse]:
        self.fetched.append(list(request.trajectory_ids))
        for trajectory_id in request.trajectory_ids:
            if trajectory_id in self.damaged:
                raise DataLoss(f"checksum of {trajectory_id}")
            trajectory = common_pb2.Trajectory(
                trajectory_id=trajectory_id,
                domain="code",
                turns=[make_turn(trajectory_id)],
                rewards=[make_reward()],
            )
            if trajectory_id in self.better:
                trajectory.rewards[0].value += 1
            for chunk in split(trajectory.SerializeToString()):
                yield pool_pb2.FetchTrajectoriesResponse(
                    trajectory_id=trajectory_id, trajectory=chunk
                )
            if self.silent_after_first:
                self.silent_after_first = False
                await asyncio.Event().wait()
            fault, self.fault = self.fault, None
            if fault is not None:
                raise fault


class Cluster:
    """A source with what it talks to."""

    def __init__(self, *, refill_groups: int = 0) -> None:
        self.scheduler: Any = FakeScheduler()
        self.pool: Any = FakePool()
        self.baselines_s: dict[str, float] = {}
        reading = LocalReading(
            fetch=TrajectoryFetch(shard_in(self.pool), patience_s=60.0),
            plan=lambda samples: BatchPlan(trees=(), plan_s=float(len(samples))),
            rules=replace(RULES, drop_flat_groups=refill_groups > 0),
        )
        self.source = BatchSource(
            self.scheduler,
            reading,
            baselines_s=lambda: self.baselines_s,
            settings=SourceSettings(
                trainer_id="trainer",
                max_groups=3,
                patience_s=60.0,
                refill_groups=refill_groups,
            ),
        )
