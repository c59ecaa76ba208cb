"""Reads, credits and plans the groups of one data group, on its first rank.

Owns the groups that were read for a batch until they are planned, and the plans until their step.
`divided_reading` gives the orders. A failed order leaves what was read, so a
repetition reads the rest.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from forge.core.errors import ForgeError, Unavailable
from forge.rl.learner.batch_plan import BatchPlan, plan_updates
from forge.runtime.rpc.channel import Channels
from forge.runtime.telemetry import log
from forge.v1 import common_pb2, pool_pb2_grpc
from services.trainer.batches.logged_rollouts import logged_row
from services.trainer.batches.read_orders import (
    LeasedGroup,
    PlanGroups,
    ReadAnswer,
    ReadGroups,
    ReadOrder,
    failed,
)
from services.trainer.batches.traced_calls import traced_calls
from services.trainer.batches.trajectory_fetch import TrajectoryFetch
from services.trainer.samples.group_facts import ReadGroup, group_samples, read_group


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """A group that was read."""

    trajectories: list[common_pb2.Trajectory]
    read: ReadGroup


@dataclass(slots=True, kw_only=True)
class _Batch:
    """This rank's part of a batch."""

    held: dict[int, _Held] = field(default_factory=dict)
    """By number of the group, until it is planned."""
    plans: list[BatchPlan] | None = None
    """Plan of each update, once made."""


class GroupReader:
    """One rank's end of reading. Orders are answered one at a time; `taken` may be called by
    another thread."""

    def __init__(self, channels: Channels) -> None:
        self._channels = channels
        self._batches: dict[int, _Batch] = {}

    async def answer(self, order: ReadOrder) -> ReadAnswer:
        """Carry out an order. An error is an answer, too: the other ranks wait for it."""
        kept = self._batches
        self._batches = {n: one for n, one in kept.items() if n >= order.batch - 1}
        try:
            match order:
                case ReadGroups():
                    return await self._read(order)
                case PlanGroups():
                    return await asyncio.to_thread(self._plan, order)
        except ForgeError as error:
            return failed(error)
        except Exception as error:  # without an answer rank 0 would wait forever
            log.error("read_order_failed", exc_info=True)
            return failed(ForgeError(repr(error)))

    def taken(self, batch: int) -> Sequence[BatchPlan]:
        """Return the plan of each update of a batch, and drop the batch."""
        found = self._batches.pop(batch, _Batch())
        assert found.plans is not None, f"batch {batch} is planned"
        return found.plans

    async def _read(self, order: ReadGroups) -> ReadAnswer:
        batch = self._batches.setdefault(order.batch, _Batch())
        lost: dict[str, str] = {}
        by_shard: dict[str, list[LeasedGroup]] = {}
        for group in order.groups:
            if group.number not in batch.held:
                by_shard.setdefault(group.pool_shard, []).append(group)
        ended = await asyncio.gather(
            *(self._read_shard(order, batch, groups, lost) for groups in by_shard.values()),
            return_exceptions=True,
        )
        for one in ended:
            if isinstance(one, BaseException):
                raise one
        held = {group.number: batch.held.get(group.number) for group in order.groups}
        return ReadAnswer(
            lost=lost,
            facts={number: one.read.facts for number, one in held.items() if one is not None},
            traceparents={
                number: traced_calls([one.trajectories])
                for number, one in held.items()
                if one is not None and order.traced
            },
        )

    async def _read_shard(
        self,
        order: ReadGroups,
        batch: _Batch,
        groups: Sequence[LeasedGroup],
        lost: dict[str, str],
    ) -> None:
        async def find(shard: str) -> Any:
            if not (addresses := order.addresses.get(shard)):
                raise Unavailable(f"pool shard {shard} has no address")
            return self._channels.stub(pool_pb2_grpc.PoolServiceStub, random.choice(addresses))

        fetch = TrajectoryFetch(find, patience_s=order.patience_s)
        wanted = [trajectory_id for group in groups for trajectory_id in group.trajectory_ids]
        found = await fetch.fetch_shard(groups[0].pool_shard, wanted, lost)
        for group in groups:
            if all(one in found for one in group.trajectory_ids):
                trajectories = [found[one] for one in group.trajectory_ids]
                read = await asyncio.to_thread(
                    read_group, trajectories, order.rules, order.baselines_s
                )
                batch.held[group.number] = _Held(trajectories=trajectories, read=read)

    def _plan(self, order: PlanGroups) -> ReadAnswer:
        began_s = time.perf_counter()
        batch = self._batches.setdefault(order.batch, _Batch())
        updates: list[list[Any]] = [[] for _ in range(order.updates)]
        for one in order.groups:
            held = batch.held[one.number]
            updates[one.update] += group_samples(held.read, one.credit, order.rules)
        settings = order.settings
        batch.plans = plan_updates(
            updates,
            token_budget=settings.token_budget,
            channels=settings.channels,
            relay=settings.relay,
            route_shape=settings.route_shape,
        )
        rows = tuple(
            logged_row(batch.held[number].trajectories[place]) for number, place in order.rows
        )
        batch.held = {}
        return ReadAnswer(rows=rows, plan_s=time.perf_counter() - began_s)
