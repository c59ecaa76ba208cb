"""Stand-ins for the pool shards, and one term's actors around them."""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from forge.core.errors import ForgeError, Unavailable
from forge.core.queue.admission import QueueSettings
from forge.core.queue.generation_queue import GenerationQueue
from forge.runtime.actors.actor_system import ActorRef, ActorSystem
from forge.runtime.actors.supervision import Restart
from forge.runtime.coordination import Leadership
from forge.v1 import common_pb2, pool_pb2
from services.scheduler.actors.commits import CommitActor
from services.scheduler.actors.expired_leases import ExpiredLeaseActor
from services.scheduler.actors.outcome_writer import OutcomeWriter
from services.scheduler.actors.queue import QueueActor
from services.scheduler.actors.submissions import SubmissionActor
from services.scheduler.leadership.term import LeaderContext
from services.scheduler.listening_clock import ListeningClock
from services.scheduler.shards.pool_shards import Floors, GroupStateChange, PoolShards
from services.scheduler.shards.shard_membership import ShardMembership
from services.scheduler.state.messages.term import Connect
from services.scheduler.state.term_state import TermState
from services.scheduler.term_record import OwnRecord, TermRecord
from tests.support.pool.records import make_reward

ASK_S = 60.0


class FakeShards(PoolShards):
    """What `PoolShards` promises, in memory; a shard in `down` does not answer, and one in `hung`
    does not even fail to."""

    def __init__(self) -> None:
        self.down: set[str] = set()
        self.hung: set[str] = set()
        self.freed: set[str] = set()
        """Tasks whose records the pool has freed."""
        self.refusal: type[ForgeError] = Unavailable
        self.groups: dict[str, list[common_pb2.GroupRecord]] = defaultdict(list)
        self.changes: dict[str, list[GroupStateChange]] = defaultdict(list)
        self.stored: dict[str, common_pb2.TrajectorySummary] = {}
        self.shards = {"s0", "s1"}
        self.scanned: list[pool_pb2.ScanGroupsResponse] = []
        """What s0 holds when a term begins."""
        self.looked_up: list[tuple[tuple[str, ...], tuple[str, ...]]] = []
        """Task and batch ids of each look-up."""
        self.answers_look_ups = False
        """Whether shards that are down answer these."""
        self.tells_all = False
        """Whether a scan tells what was put and changed since, in place of `scanned`."""

    def live(self) -> frozenset[str]:
        return frozenset(self.shards)

    async def put_groups(self, shard: str, groups: Iterable[common_pb2.GroupRecord]) -> None:
        await self._answer(shard)
        self.groups[shard] += groups

    async def set_states(
        self, changes: Mapping[str, Sequence[GroupStateChange]], *, tombstone_freed: bool = False
    ) -> list[str]:
        for shard, changed in changes.items():
            await self._answer(shard)
            self.changes[shard] += changed
        ids = (change.task_id for changed in changes.values() for change in changed)
        return [task_id for task_id in ids if tombstone_freed and task_id in self.freed]

    async def summaries(
        self, trajectory_ids: Mapping[str, Sequence[str]]
    ) -> dict[str, common_pb2.TrajectorySummary]:
        for shard in trajectory_ids:
            await self._answer(shard)
        asked = [each for ids in trajectory_ids.values() for each in ids]
        return {each: self.stored[each] for each in asked if each in self.stored}

    async def floors(self, names: Iterable[str]) -> Floors:
        return Floors(fence=0, term=0)

    async def raise_fence(self, shard: str, *, term: int) -> None:
        await self._answer(shard)

    async def scan(self, shard: str, **_: Any) -> AsyncGenerator[pool_pb2.ScanGroupsResponse, None]:
        await self._answer(shard)
        yield pool_pb2.ScanGroupsResponse(begin=pool_pb2.ScanGroupsResponse.Begin(mark="fake:0"))
        async for response in self.scan_settled(shard):
            yield response

    async def look_up(
        self, names: Iterable[str], *, task_ids: Sequence[str], batch_ids: Sequence[str]
    ) -> tuple[dict[str, common_pb2.GroupRecord], dict[str, int]]:
        self.looked_up.append((tuple(task_ids), tuple(batch_ids)))
        groups: dict[str, common_pb2.GroupRecord] = {}
        commits: dict[str, int] = {}
        error: ForgeError | None = None
        for shard in names:
            try:
                if not self.answers_look_ups:
                    await self._answer(shard)
            except ForgeError as refused:
                error = refused
                continue
            records = [self._now(record).group for record in self.groups[shard]]
            groups |= {one.task.task_id: one for one in records if one.task.task_id in task_ids}
            commits |= {one.batch_id: one.step for one in records if one.batch_id in batch_ids}
        if error is not None and (set(task_ids) - groups.keys() or set(batch_ids) - commits.keys()):
            raise error
        return groups, commits

    async def scan_settled(
        self, shard: str, *, tag: str = "", trained_after: int | None = None
    ) -> AsyncGenerator[pool_pb2.ScanGroupsResponse, None]:
        """Every group, as a shard of an earlier version does."""
        await self._answer(shard)
        if self.tells_all:
            for record in self.groups[shard]:
                yield self._now(record)
        for response in self.scanned if shard == "s0" and not self.tells_all else ():
            yield response

    def _now(self, record: common_pb2.GroupRecord) -> pool_pb2.ScanGroupsResponse:
        """A group as it was put, with its last change and its trajectories."""
        response = pool_pb2.ScanGroupsResponse(group=record)
        task_id = record.task.task_id
        for change in self.changes[record.pool_shard]:
            if change.task_id == task_id:
                response.group.state, response.group.step = change.state, change.step
                response.group.batch_id, response.group.reason = change.batch_id, change.reason
        ids = (each for each in self.stored if each.partition(":")[0] == task_id)
        response.trajectories.extend(self.stored[each] for each in ids)
        return response

    def seal(self, trajectory_id: str, *, reward: float = 1.0) -> None:
        self.stored[trajectory_id] = common_pb2.TrajectorySummary(
            trajectory_id=trajectory_id,
            state=common_pb2.TRAJECTORY_STATE_SEALED,
            rewards=[make_reward(value=reward)],
        )

    def states(self) -> dict[str, int]:
        """The last state stored, by task id."""
        return {one.task_id: one.state for changed in self.changes.values() for one in changed}

    async def _answer(self, shard: str) -> None:
        if shard in self.hung:
            await asyncio.Event().wait()
        if shard in self.down:
            raise self.refusal(f"pool shard {shard} does not answer")


class FakeRecord(OwnRecord):
    """The term record, in memory."""

    def __init__(self) -> None:
        self.fields: dict[str, Any] = {}

    async def amend(self, **changes: Any) -> TermRecord:
        self.fields |= changes
        return await self.read()

    async def read(self) -> TermRecord:
        return TermRecord(**self.fields)


class Clock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class FirmLeadership(Leadership):
    """One that holds."""

    def __init__(self) -> None:
        self.fence = 1

    @property
    def alive(self) -> bool:
        return True


class TermActors:
    """The actors of one term, wired as `Term` wires them."""

    queue: ActorRef
    submissions: ActorRef
    commits: ActorRef
    expired_leases: ActorRef

    def __init__(
        self,
        shards: FakeShards,
        clock: Clock,
        *,
        skip_equal_rewards: bool = False,
        most_settled: float = math.inf,
    ) -> None:
        self.shards = shards
        self.clock = clock
        settings = QueueSettings(
            concurrency=8, window=8, rollout_lease_s=10.0, short_batch_after_s=0.0, max_attempts=2
        )
        self.state = TermState(
            GenerationQueue(settings),
            max_pending=100,
            skip_equal_rewards=skip_equal_rewards,
            stall_after_s=120.0,
            most_settled=most_settled,
        )
        self.record = FakeRecord()
        self.loop_time_s = 0.0
        self.system = ActorSystem("term")

    async def start(self) -> None:
        spawn = partial(self.system.spawn, restart=Restart(max_restarts=0))
        self.queue = await spawn(self.actor, name="queue")
        self.submissions = await spawn(
            lambda: SubmissionActor(
                self.queue,
                self.shards,
                next_index={common_pb2.PURPOSE_TRAIN: 0, common_pb2.PURPOSE_EVAL: 0},
                placeable=self.shards.live,
                reachable=self.shards.live,
            ),
            name="submissions",
        )
        self.commits = await spawn(
            lambda: CommitActor(self.queue, self.shards, self.record), name="commits"
        )
        self.expired_leases = await spawn(
            lambda: ExpiredLeaseActor(self.queue, self.shards), name="expired_leases"
        )
        outcome_writer = await spawn(lambda: OutcomeWriter(self.shards), name="outcome_writer")
        connect = Connect(
            queue=self.queue, outcome_writer=outcome_writer, expired_leases=self.expired_leases
        )
        await self.queue.ask(connect, timeout_s=ASK_S)

    def actor(self) -> QueueActor:
        """A queue actor whose ticks are as late as a test says."""
        return QueueActor(
            self.state, clock=ListeningClock(self.clock), loop_time=lambda: self.loop_time_s
        )

    def leader(self) -> LeaderContext:
        """What calls need of this term, whose leadership holds."""
        return LeaderContext(
            leadership=FirmLeadership(),
            queue=self.queue,
            submissions=self.submissions,
            commits=self.commits,
            removals=self.commits,
            members=ShardMembership(),
            shards=self.shards,
        )
