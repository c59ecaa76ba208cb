"""Batches read by rank 0 and by all ranks.

`torchrun --nproc-per-node 4 -m tests.support.trainer.readings KEY` prints, on rank 0, one JSON
object: {"<mesh> <type> <case>": the largest relative error of loss and gradients in fp64, and of
statistics in fp32}, and what failed reads raised. Rank 0 serves the trajectories of all cases over
gRPC; the other ranks fetch them with the key, or with the token in KEY.token.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from forge.core.errors import ForgeError, NotFound
from forge.rl.config import LearnerConfig
from forge.rl.learner.batch_plan import BatchPlan, plan_batch
from forge.rl.learner.group_plans import group_plans
from forge.rl.learner.learner import Learner
from forge.rl.learner.own_plans import joined_plan
from forge.rl.losses.stats import TokenStats, policy_stats
from forge.rl.losses.token_values import token_values
from forge.rl.model.policy import TreePolicy
from forge.rl.parallel.world import World, make_world, whole
from forge.runtime.rpc.channel import Channels
from forge.runtime.rpc.chunks import split
from forge.runtime.rpc.server import RpcServer
from forge.runtime.security.credentials import Security
from forge.runtime.security.tokens import Keyring
from forge.v1 import pool_pb2, pool_pb2_grpc
from services.pool.service import FULL_NAME, SCOPES
from services.trainer.batches.divided_reading import DividedReading, ReadingSettings
from services.trainer.batches.group_reader import GroupReader
from services.trainer.batches.read_orders import PlanSettings
from services.trainer.batches.reading import LocalReading, PlannedBatch, ReadBatch
from services.trainer.batches.trajectory_fetch import TrajectoryFetch, Unreadable
from services.trainer.config import TrainerConfig
from services.trainer.learner.reading_ranks import (
    DataGroupReaders,
    RankReader,
    ReadChannel,
    reading_groups,
)
from services.trainer.mesh import MeshSettings
from services.trainer.samples.samples import BatchSamples
from tests.support.rl.models import tiny_model, wide_norms
from tests.support.trainer.reading_cases import CASES, Case, groups_of, leased

MESHES = {
    2: ["1x2x1x1"],
    4: ["1x4x1x1", "2x2x1x1", "1x2x2x1", "1x2x1x2", "2x1x1x2"],
}
"""Meshes by number of ranks: dp_replicate x dp_shard x cp x tp."""
BUDGET = 24
CHANNELS = 16


class Pool(pool_pb2_grpc.PoolServiceServicer):
    """Serves trajectories that are in memory."""

    def __init__(self) -> None:
        every = [one for name in CASES for group in groups_of(name) for one in group]
        self.stored = {one.trajectory_id: one.SerializeToString() for one in every}

    async def FetchTrajectories(
        self, request: pool_pb2.FetchTrajectoriesRequest, context: Any
    ) -> AsyncIterator[pool_pb2.FetchTrajectoriesResponse]:
        for trajectory_id in request.trajectory_ids:
            if trajectory_id not in self.stored:
                raise NotFound(f"trajectory {trajectory_id} was erased")
            for chunk in split(self.stored[trajectory_id]):
                yield pool_pb2.FetchTrajectoriesResponse(
                    trajectory_id=trajectory_id, trajectory=chunk
                )


@dataclass(slots=True, kw_only=True)
class Rank:
    """One rank of a mesh, with both ways to read."""

    world: World
    key: Path
    address: str
    config: TrainerConfig
    readers: DataGroupReaders | None = None
    reading: Any = None
    peers: Any = None

    @classmethod
    def of(cls, mesh: str, key: Path, address: str) -> Rank:
        replicate, shard, cp, tp = map(int, mesh.split("x"))
        settings = MeshSettings(dp_replicate=replicate, dp_shard=shard, cp=cp, tp=tp)
        token = key.with_suffix(".token")
        config = TrainerConfig(
            key_file=str(key),
            instance_id="trainer",
            read_from="ranks",
            rank_token_file=str(token) if token.exists() else "",
            mesh=settings,
        )
        world = make_world(config.mesh_shape, torch.device("cpu"))
        rank = cls(world=world, key=key, address=address, config=config)
        groups = reading_groups(world, config)
        rank.peers = groups.peers
        if world.rank == 0 and groups.firsts is not None:
            own = GroupReader(rank.channels())
            rank.readers = DataGroupReaders(own, count=world.shape.data_groups)
            rank.readers.connect(ReadChannel(groups.firsts))
        elif groups.firsts is not None:
            rank.reading = RankReader(groups.firsts, config, rank=world.rank)
        return rank

    def channels(self) -> Channels:
        return Channels(Security(Keyring.from_file(self.key), subject="trainer"))

    async def divided(
        self, name: str, *, addresses: Callable[[str], Awaitable[tuple[str, ...]]] | None = None
    ) -> tuple[BatchSamples, PlannedBatch]:
        """On rank 0."""
        assert self.readers is not None
        case = CASES[name]
        reading = DividedReading(
            self.readers,
            addresses or self._everywhere,
            settings=ReadingSettings(
                rules=case.rules,
                plan=PlanSettings(
                    token_budget=BUDGET,
                    channels=CHANNELS,
                    relay=self.world.shape.cp == 1,
                    route_shape=None,
                ),
                mini_batches=case.mini_batches,
                patience_s=0.2,
                logged_rollouts=3,
            ),
        )
        reading._numbers = NUMBERS
        draft = reading.begin({})
        await draft.add(leased(groups_of(name)))
        return await draft.samples(), await draft.planned()

    async def _everywhere(self, _: str) -> tuple[str, ...]:
        return (self.address,)

    async def alone(self, name: str) -> tuple[BatchSamples, PlannedBatch]:
        """As rank 0 alone reads it."""
        case, channels = CASES[name], self.channels()

        async def find(_: str) -> Any:
            return pool_pb2_grpc.PoolServiceStub(channels.get(self.address))

        def plan(samples: Any) -> BatchPlan:
            return plan_batch(
                samples,
                token_budget=BUDGET,
                channels=CHANNELS,
                relay=self.world.shape.cp == 1,
                data_groups=self.world.shape.data_groups,
                mini_batches=case.mini_batches,
            )

        reading = LocalReading(
            fetch=TrajectoryFetch(find, patience_s=5.0),
            plan=plan,
            rules=case.rules,
            logged_rollouts=3,
        )
        draft = reading.begin({})
        await draft.add(leased(groups_of(name)))
        found = await draft.samples(), await draft.planned()
        await channels.close()
        return found


NUMBERS = itertools.count(1)


def learner_of(rank: Rank, case: Case) -> Learner:
    policy = TreePolicy(tiny_model("llama", torch.float64))
    policy.spread(rank.world)
    return Learner(policy, LearnerConfig(token_budget=BUDGET, objective=case.objective))


Gradient = tuple[float, dict[str, torch.Tensor], list[TokenStats]]


def gradients(learner: Learner, plan: BatchPlan) -> list[Gradient]:
    """Loss, gradient and statistics of each update, under the same weights."""
    found = []
    for update in plan.updates:
        loss, stats = learner.accumulate(update)
        named = learner.policy.model.named_parameters()
        grads = {name: whole(one.grad).clone() for name, one in named if one.grad is not None}
        found.append((loss, grads, stats))
    return found


def errors_of(found: Sequence[Gradient], expected: Sequence[Gradient]) -> tuple[float, float]:
    """Of loss and gradients, and of statistics, whose columns are float32."""
    assert len(found) == len(expected)
    worst = far = 0.0
    for (loss, grads, stats), (other, theirs, their_stats) in zip(found, expected, strict=True):
        assert grads.keys() == theirs.keys() and any(one.abs().max() > 0 for one in theirs.values())
        scale = max(float(one.abs().max()) for one in theirs.values())
        apart = max(float((grads[name] - theirs[name]).abs().max()) for name in theirs)
        worst = max(worst, abs(loss - other) / max(1.0, abs(other)), apart / scale)
        if not dist.get_rank():  # which alone has those of all groups
            numbers = stats_of(stats), stats_of(their_stats)
            assert numbers[0].keys() == numbers[1].keys()
            far = max(far, *(abs(numbers[0][key] - numbers[1][key]) for key in numbers[1]))
    return worst, far


def stats_of(stats: Sequence[TokenStats]) -> dict[str, float]:
    found = policy_stats(stats, weight_version=5)
    numbers = {
        one.name: float(getattr(found, one.name))
        for one in fields(found)
        if isinstance(getattr(found, one.name), int | float)
    }
    values = token_values(stats, range(1000))
    columns = values.columns.double().split(values.lengths, dim=1)
    return numbers | {
        f"values of {number}": float(column.sum())
        for number, column in zip(values.numbers, columns, strict=True)
    }


async def case_errors(rank: Rank, name: str) -> tuple[float, float]:
    case = CASES[name]
    batch, whole_batch = await rank.alone(name)
    learner = learner_of(rank, case)
    plan = whole_batch.plan
    assert isinstance(plan, BatchPlan)
    if rank.world.rank:
        plan = group_plans(plan, learner.policy)[rank.world.data_group].plan()
    expected = gradients(learner, plan)
    number: list[Any] = [0]
    if not rank.world.rank:
        divided, read = await rank.divided(name)
        assert isinstance(read.plan, ReadBatch)
        assert read.rollouts == whole_batch.rollouts and len(read.rollouts) == min(
            3, sum(case.sizes)
        )
        assert_same(divided, batch)
        number = [read.plan.number]
    dist.broadcast_object_list(number, src=0)
    reader = rank.readers.own if rank.readers else rank.reading.reader if rank.reading else None
    own = reader.taken(number[0]) if reader is not None else None
    joint = joined_plan(own, learner.policy, peers=rank.peers)
    assert joint.trained_tokens == sum(one.trained_tokens for one in batch.samples)
    assert joint.sample_tokens == sum(one.tokens for one in batch.samples)
    return errors_of(gradients(learner, joint), expected)


def assert_same(divided: BatchSamples, batch: BatchSamples) -> None:
    """In all statistics."""
    assert not divided.samples and batch.samples
    for one in fields(batch):
        if one.name != "samples":
            assert getattr(divided, one.name) == getattr(batch, one.name), one.name
    sizes = [(one.number, one.group, one.trained_tokens) for one in batch.samples]
    assert sizes == [tuple(one) for one in divided.sizes]


async def failures(rank: Rank, pool: Pool) -> dict[str, str]:
    """What rank 0 raises for reads that fail on another rank; the next read then succeeds."""
    found = {}

    async def away(shard: str) -> tuple[str, ...]:
        return ("127.0.0.1:1",) if shard == "s2" else (rank.address,)

    for name, addresses in (("shard away", away), ("erased", None)):
        gone = {} if addresses else {"unequal groups-2:1:0": b""}
        kept = {one: pool.stored.pop(one) for one in gone}
        try:
            await rank.divided("unequal groups", addresses=addresses)
        except (ForgeError, Unreadable) as error:
            lost = sorted(error.lost) if isinstance(error, Unreadable) else []
            found[name] = f"{type(error).__name__} {lost} {error}"
        pool.stored |= kept
        _, planned = await rank.divided("unequal groups")
        assert isinstance(planned.plan, ReadBatch)
    return found


async def served(key: Path) -> tuple[RpcServer, Pool, str]:
    server = RpcServer(
        service="pool", host="127.0.0.1", port=0, security=Security(Keyring.from_file(key))
    )
    pool = Pool()
    server.add_service(
        pool_pb2_grpc.add_PoolServiceServicer_to_server, pool, full_name=FULL_NAME, scopes=SCOPES
    )
    return server, pool, await server.start()


LOOP = asyncio.new_event_loop()
"""Of both ways to read: exchanges of gradients block it."""


async def beside(call: Coroutine[Any, Any, Any]) -> Any:
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call, LOOP))


async def main() -> None:
    torch.set_num_threads(1)
    threading.Thread(target=LOOP.run_forever, daemon=True).start()
    ranks = int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    key = Path(sys.argv[1])
    server, pool, address = await served(key) if not dist.get_rank() else (None, None, "")
    told: list[Any] = [address]
    dist.broadcast_object_list(told, src=0)
    found: dict[str, Any] = {}
    for mesh in MESHES[ranks]:
        rank = Rank.of(mesh, key, told[0])
        for name in CASES:
            # Threads: rank 0 serves meanwhile.
            with wide_norms():
                of_gradient, of_statistics = await beside(case_errors(rank, name))
            found[f"{mesh} fp64 {name}"] = of_gradient
            found[f"{mesh} fp32 {name}"] = of_statistics
        if pool is not None:
            raised = await beside(failures(rank, pool))
            found |= {f"{mesh} {name}": line for name, line in raised.items()}
        await asyncio.to_thread(dist.barrier)
    if server is not None:
        print(json.dumps(found))
        sys.stdout.flush()
    await asyncio.to_thread(dist.barrier)
    # Without the destructors of threads that wait for the next order.
    os._exit(0)


if __name__ == "__main__":
    asyncio.run(main())
