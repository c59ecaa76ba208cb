"""Batches beyond one gRPC message, from a scheduler and a pool shard to the trainer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from forge.core.errors import InvalidArgument
from forge.core.tasks.validation import MAX_GROUP_SIZE
from forge.core.trajectory import MAX_NUMBER
from forge.runtime.coordination import Coordinator, Discovery
from forge.runtime.rpc.channel import MAX_MESSAGE_BYTES, Channels
from forge.runtime.rpc.chunks import split
from forge.runtime.rpc.remote import Remote
from forge.runtime.rpc.server import RpcServer
from forge.runtime.rpc.status import translated
from forge.runtime.security.credentials import Security
from forge.runtime.security.tokens import Keyring
from forge.v1 import common_pb2, pool_pb2, pool_pb2_grpc, scheduler_pb2, scheduler_pb2_grpc
from services.pool import service as pool_service
from services.scheduler import service as scheduler_service
from services.scheduler.config import SchedulerConfig
from services.scheduler.state.messages.batches import ReleaseBatch
from services.scheduler.state.messages.groups import Submit
from services.scheduler.state.messages.rollouts import AttemptReport, LeaseRollouts, SettleRollouts
from services.trainer.batches.batch_source import BatchSource, SourceSettings
from services.trainer.batches.reading import LocalReading
from services.trainer.batches.trajectory_fetch import TrajectoryFetch
from tests.support.runtime.unused import unused
from tests.support.scheduler.cluster import make_task
from tests.support.scheduler.term import ASK_S, Clock, FakeShards, TermActors

SECURITY = Security(Keyring((bytes(32),)), subject="test")
GROUPS = 3
TASK_ID = "t" * 199


@asynccontextmanager
async def served(kind: str, add: Callable[..., Any], servicer: Any) -> AsyncIterator[str]:
    """The address of a server of this process."""
    scopes = {"pool": pool_service, "scheduler": scheduler_service}[kind]
    server = RpcServer(service=kind, host="127.0.0.1", port=0, security=SECURITY)
    server.add_service(add, servicer, full_name=scopes.FULL_NAME, scopes=scopes.SCOPES)
    address = await server.start()
    try:
        yield address
    finally:
        await server.stop(grace_s=0)


class SchedulerAt(Remote[scheduler_pb2_grpc.SchedulerServiceStub]):
    """Calls the scheduler at one address."""

    def __init__(self, channels: Channels, address: str) -> None:
        self._stub: Any = scheduler_pb2_grpc.SchedulerServiceStub(channels.get(address))
        self.calls: list[str] = []
        self.after_first: Callable[[Any], Awaitable[None]] | None = None
        """Called once, with the first answer."""

    async def call(self, method: str, request: Any, **_: Any) -> Any:
        self.calls.append(method)
        async with translated():
            answer = await getattr(self._stub, method)(request, timeout=ASK_S)
        after, self.after_first = self.after_first, None
        if after is not None:
            await after(answer)
        return answer


async def complete(term: TermActors) -> None:
    """Groups of the largest size with ids of the greatest length, sealed."""
    ids = [f"{TASK_ID}{number}" for number in range(GROUPS)]
    tasks = {task_id: make_task(task_id, size=MAX_GROUP_SIZE) for task_id in ids}
    await term.submissions.ask(Submit(tasks=tasks), timeout_s=ASK_S)
    left = GROUPS * MAX_GROUP_SIZE
    while left:
        ask = LeaseRollouts(runner_id="r", max_rollouts=left)
        grants = await (await term.queue.ask(ask, timeout_s=ASK_S))
        for grant in grants:
            term.shards.seal(grant.trajectory_id)
            summary = term.shards.stored[grant.trajectory_id]
            summary.task_id, summary.domain = grant.task.task_id, "d" * 64
        reports = [
            AttemptReport(
                trajectory_id=one.trajectory_id, summary=term.shards.stored[one.trajectory_id]
            )
            for one in grants
        ]
        await term.queue.ask(SettleRollouts(reports=reports), timeout_s=ASK_S)
        left -= len(grants)


@asynccontextmanager
async def leasing() -> AsyncIterator[tuple[BatchSource, SchedulerAt, TermActors]]:
    """A trainer's source of batches around a scheduler with complete groups."""
    term = TermActors(FakeShards(), Clock())
    await term.start()
    servicer = scheduler_service.SchedulerServicer(
        SchedulerConfig(etcd="etcd:2379"), unused(Keyring), unused(Discovery), unused(Coordinator)
    )
    servicer.leader = term.leader()
    channels = Channels(SECURITY)
    add = scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server
    try:
        await complete(term)
        async with served("scheduler", add, servicer) as address:
            scheduler = SchedulerAt(channels, address)
            settings = SourceSettings(trainer_id="trainer", max_groups=GROUPS, patience_s=0.0)
            source = BatchSource(
                scheduler, unused(LocalReading), baselines_s=dict, settings=settings
            )
            yield source, scheduler, term
    finally:
        await channels.close()
        await term.system.stop()


async def leased(source: BatchSource) -> scheduler_pb2.LeaseBatchResponse:
    batch = await source._lease("trainer#0", max_groups=GROUPS)
    assert batch is not None
    return batch


async def test_batch_beyond_one_message_is_leased_in_pages() -> None:
    """With every trajectory of the largest groups, in order; later leases get the same batch."""
    async with leasing() as (source, scheduler, _):
        batch = await leased(source)
        assert batch.ByteSize() > MAX_MESSAGE_BYTES
        assert len(scheduler.calls) > 1
        assert [one.group.task.task_id for one in batch.groups] == [
            f"{TASK_ID}{number}" for number in range(GROUPS)
        ]
        assert [len(one.trajectories) for one in batch.groups] == [MAX_GROUP_SIZE] * GROUPS
        assert await leased(source) == batch


async def test_loss_on_a_later_page_tombstones_its_group_alone() -> None:
    """The source then leases the others anew."""
    async with leasing() as (source, _, term):
        del term.shards.stored[f"{TASK_ID}2:7:0"]
        batch = await leased(source)
        assert [one.group.task.task_id for one in batch.groups] == [f"{TASK_ID}0", f"{TASK_ID}1"]
        assert term.shards.states() == {f"{TASK_ID}2": common_pb2.GROUP_STATE_TOMBSTONED}


async def test_batch_lost_between_pages_is_leased_anew() -> None:
    """No groups of two batches are mixed."""
    async with leasing() as (source, scheduler, term):

        async def lose(answer: scheduler_pb2.LeaseBatchResponse) -> None:
            await term.commits.ask(ReleaseBatch(batch_id=answer.batch_id), timeout_s=ASK_S)

        scheduler.after_first = lose
        batch = await leased(source)
        assert len(batch.groups) == batch.total_groups == GROUPS
        assert await leased(source) == batch


async def test_trainer_that_reads_no_pages_gets_no_part_of_a_batch() -> None:
    """It would commit groups that it did not train."""
    async with leasing() as (_, scheduler, _):
        request = scheduler_pb2.LeaseBatchRequest(trainer_id="t", max_groups=GROUPS)
        with pytest.raises(InvalidArgument, match="one message holds"):
            await scheduler.call("LeaseBatch", request)


class Pool(pool_pb2_grpc.PoolServiceServicer):
    """Streams an empty trajectory for every id."""

    async def FetchTrajectories(
        self, request: pool_pb2.FetchTrajectoriesRequest, context: Any
    ) -> AsyncIterator[pool_pb2.FetchTrajectoriesResponse]:
        (chunk,) = split(common_pb2.Trajectory(turns=[common_pb2.Turn()]).SerializeToString())
        for trajectory_id in request.trajectory_ids:
            yield pool_pb2.FetchTrajectoriesResponse(trajectory_id=trajectory_id, trajectory=chunk)


async def test_ids_beyond_one_message_are_fetched_in_several_requests() -> None:
    """Each trajectory once."""
    ids = [f"{TASK_ID}0:{MAX_NUMBER - number}:{MAX_NUMBER}" for number in range(20_000)]
    request = pool_pb2.FetchTrajectoriesRequest(trajectory_ids=ids)
    assert request.ByteSize() > MAX_MESSAGE_BYTES
    add = pool_pb2_grpc.add_PoolServiceServicer_to_server
    channels, lost = Channels(SECURITY), dict[str, str]()
    async with served("pool", add, Pool()) as address:
        stub = pool_pb2_grpc.PoolServiceStub(channels.get(address))

        async def find(_: str) -> Any:
            return stub

        found = await TrajectoryFetch(find, patience_s=0.0).fetch_shard("s0", ids, lost)
        await channels.close()
    assert list(found) == ids and not lost


def task_ids(count: int) -> Sequence[str]:
    return [TASK_ID + "0"] * count


def test_held_batches_of_the_largest_settings_fit_a_message() -> None:
    """Two batches, one in training and one in preparation, with the most refills, one group
    each."""
    refills, groups, batch_id = 4096, 4096, f"batch-{2**63}-{2**31}"
    held = [scheduler_pb2.HeldBatch(batch_id=batch_id, task_ids=task_ids(groups))]
    held += [scheduler_pb2.HeldBatch(batch_id=batch_id, task_ids=task_ids(1))] * refills
    request = scheduler_pb2.LeaseBatchRequest(trainer_id="t" * 200, first_group=0, held=held * 2)
    assert request.ByteSize() < MAX_MESSAGE_BYTES
    commit = scheduler_pb2.CommitBatchRequest(batch_id=batch_id, task_ids=task_ids(groups))
    assert commit.ByteSize() < MAX_MESSAGE_BYTES
