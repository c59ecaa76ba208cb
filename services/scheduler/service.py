"""SchedulerService over gRPC: check the request, ask an actor of the term, encode the answer.

Owns no state except the current term, which only the leader has. A standby answers UNAVAILABLE with
the leader's address in the trailing metadata `forge-leader`.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from forge.client.scheduler import START_KEY
from forge.core.errors import ActorStopped, MailboxFull, Unavailable
from forge.runtime.coordination import Coordinator, Discovery
from forge.runtime.rpc.interceptor import current_claims
from forge.runtime.rpc.status import to_status, trailing_metadata
from forge.runtime.security.issued_tokens import renew
from forge.runtime.security.tokens import Keyring
from forge.v1 import scheduler_pb2 as pb
from forge.v1 import scheduler_pb2_grpc
from services.scheduler import validation
from services.scheduler.config import SchedulerConfig
from services.scheduler.groups.batch_groups import (
    first_fitting,
    fitting,
    lost_trajectories,
    page_of,
    with_summaries,
)
from services.scheduler.groups.group_listing import list_groups
from services.scheduler.groups.rollout_results import settle_results
from services.scheduler.leadership.term import LeaderContext, Term
from services.scheduler.long_polls import poll
from services.scheduler.rollout_leases import lease_bytes, rollout_lease
from services.scheduler.state.draining_runners import IsDraining, SetRunnerDraining
from services.scheduler.state.messages.batches import (
    ApplyRelease,
    CommitBatch,
    ReleaseBatch,
    RenewBatch,
    Rewind,
    TakeBatch,
)
from services.scheduler.state.messages.groups import DropGroups, Submit
from services.scheduler.state.messages.removals import DeclareShardLost, RetireShard
from services.scheduler.state.messages.rollouts import (
    DismissRunner,
    Grant,
    LeaseRollouts,
    RenewRollouts,
    ReturnRollouts,
)
from services.scheduler.state.messages.term import GetStatus, SetActivity
from services.scheduler.state.queries.queue_positions import GetQueue

FULL_NAME = "forge.v1.SchedulerService"
SCOPES = {
    "SubmitTasks": "operator",
    "SetActivity": "operator",
    "SetRunnerDraining": "operator",
    "DropGroups": "operator",
    "RetireShard": "operator",
    "DeclareShardLost": "admin",
    "GetSchedulerStatus": "viewer",
    "GetQueue": "viewer",
    "ListGroups": "operator",
    "LeaseRollouts": "runner",
    "RenewRollouts": "runner",
    "FinishRollouts": "runner",
    "RenewToken": "runner",
}
AUDITED = frozenset(
    {
        "SubmitTasks",
        "SetActivity",
        "SetRunnerDraining",
        "DropGroups",
        "RetireShard",
        "DeclareShardLost",
        "RenewToken",
    }
)
"""Changes by people and of tokens: calls in the audit log."""
LEADER_KEY = "forge-leader"
ASK_S = 10.0
WRITE_S = 60.0
"""Deadline of messages that wait for the pool."""
LOSE_S = 600.0
"""Deadline of a declaration, which stores a record for each group in memory."""
NO_LEADER_RETRY_S = 0.2


class SchedulerServicer(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Serves every call; scheduler.proto defines what each guarantees."""

    def __init__(
        self,
        config: SchedulerConfig,
        keyring: Keyring,
        schedulers: Discovery,
        coordinator: Coordinator,
    ) -> None:
        self._config = config
        self._coordinator = coordinator
        self._keyring = keyring
        self._schedulers = schedulers
        self.leader: LeaderContext | None = None
        """Set while this instance leads."""
        self.awaiting_term: Term | None = None
        """The term of this instance while it begins."""
        self.last_failure = ""
        """Reason why the last term of this instance failed; empty once the next one begins."""

    async def SubmitTasks(
        self, request: pb.SubmitTasksRequest, context: Any
    ) -> pb.SubmitTasksResponse:
        """Accept tasks; durable on return."""
        leader = await self._lead(context)
        tasks = validation.check_tasks(request.tasks, max_group_size=self._config.max_group_size)
        accepted = await leader.submissions.ask(Submit(tasks=tasks), timeout_s=WRITE_S)
        return pb.SubmitTasksResponse(accepted=accepted)

    async def LeaseRollouts(
        self, request: pb.LeaseRolloutsRequest, context: Any
    ) -> pb.LeaseRolloutsResponse:
        """Lease rollouts to a runner, after a long poll."""
        leader = await self._lead(context)
        runner_id = validation.check_id("runner_id", request.runner_id)
        if request.leaving:
            await leader.queue.ask(DismissRunner(runner_id=runner_id), timeout_s=ASK_S)
            return pb.LeaseRolloutsResponse()
        ask = LeaseRollouts(
            runner_id=runner_id,
            max_rollouts=validation.check_count(
                "max_rollouts", request.max_rollouts, most=validation.MAX_ROLLOUTS
            ),
            abilities=validation.check_abilities(request),
            start_id=request.start_id,
            lease_bytes=partial(lease_bytes, config=self._config),
        )
        wait_s = validation.check_wait_s(request.wait_s, max_wait_s=self._config.max_wait_s)
        give_back = partial(_give_back, leader)
        grants = (
            await poll(leader.queue, ask, ask_s=ASK_S, wait_s=wait_s, give_back=give_back) or ()
        )
        drained = IsDraining(runner_id=runner_id, start_id=request.start_id)
        return pb.LeaseRolloutsResponse(
            leases=[rollout_lease(one, self._config, self._keyring) for one in grants],
            draining=not grants and await leader.queue.ask(drained, timeout_s=ASK_S),
        )

    async def RenewToken(
        self, request: pb.RenewTokenRequest, context: Any
    ) -> pb.RenewTokenResponse:
        """Renew the token of the call; every instance can."""
        token, claims = await renew(
            self._coordinator, self._keyring, current_claims(), now_s=time.time()
        )
        return pb.RenewTokenResponse(token=token, expires_unix_s=claims.expires_unix_s)

    async def RenewRollouts(
        self, request: pb.RenewRolloutsRequest, context: Any
    ) -> pb.RenewRolloutsResponse:
        """Extend leases of rollouts."""
        leader = await self._lead(context)
        ask = RenewRollouts(lease_ids=request.lease_ids, runner_id=request.runner_id)
        lost = await leader.queue.ask(ask, timeout_s=ASK_S)
        return pb.RenewRolloutsResponse(lost=lost)

    async def FinishRollouts(
        self, request: pb.FinishRolloutsRequest, context: Any
    ) -> pb.FinishRolloutsResponse:
        """Settle results of attempts, checked against the pool; name the unknown ones."""
        leader = await self._lead(context)
        refused = await settle_results(leader.queue, leader.shards, request.outcomes)
        return pb.FinishRolloutsResponse(refused=refused)

    async def LeaseBatch(
        self, request: pb.LeaseBatchRequest, context: Any
    ) -> pb.LeaseBatchResponse:
        """Lease a batch to a trainer, after a long poll."""
        leader = await self._lead(context)
        wait_s = validation.check_wait_s(request.wait_s, max_wait_s=self._config.max_wait_s)
        ask = TakeBatch(
            trainer_id=validation.check_id("trainer_id", request.trainer_id),
            max_groups=validation.check_count(
                "max_groups",
                request.max_groups or self._config.queue.batch_groups,
                most=validation.MAX_GROUPS,
            ),
            held={
                validation.check_id("batch_id", batch.batch_id): tuple(batch.task_ids)
                for batch in request.held
            },
        )
        # A batch whose caller has left stays with the trainer, whose next call gets it.
        batch = await poll(leader.queue, ask, ask_s=ASK_S, wait_s=wait_s)
        if batch is None:
            return pb.LeaseBatchResponse()
        paged = request.HasField("first_group")
        views = page_of(batch.groups, request.first_group) if paged else batch.groups
        try:
            groups = await with_summaries(leader.shards, views)
        except Unavailable:
            # The shard has just become unreachable: the next call chooses without it.
            await leader.queue.ask(ApplyRelease(batch_id=batch.batch_id), timeout_s=ASK_S)
            raise
        lost = lost_trajectories(views, groups)
        if lost:
            release = ReleaseBatch(batch_id=batch.batch_id, reasons=lost)
            await leader.commits.ask(release, timeout_s=WRITE_S)
            return pb.LeaseBatchResponse()
        return pb.LeaseBatchResponse(
            batch_id=batch.batch_id,
            groups=first_fitting(groups) if paged else fitting(groups),
            lease_s=self._config.queue.batch_lease_s,
            total_groups=len(batch.groups),
        )

    async def RenewBatch(
        self, request: pb.RenewBatchRequest, context: Any
    ) -> pb.RenewBatchResponse:
        """Extend the lease of a batch."""
        leader = await self._lead(context)
        await leader.queue.ask(RenewBatch(batch_id=request.batch_id), timeout_s=ASK_S)
        return pb.RenewBatchResponse()

    async def CommitBatch(
        self, request: pb.CommitBatchRequest, context: Any
    ) -> pb.CommitBatchResponse:
        """Commit a batch; durable on return."""
        leader = await self._lead(context)
        ask = CommitBatch(
            batch_id=validation.check_id("batch_id", request.batch_id),
            step=validation.check_step(request.step),
            task_ids=request.task_ids,
        )
        await leader.commits.ask(ask, timeout_s=WRITE_S)
        return pb.CommitBatchResponse()

    async def ReleaseBatch(
        self, request: pb.ReleaseBatchRequest, context: Any
    ) -> pb.ReleaseBatchResponse:
        """Return a batch, and tombstone groups with a reason."""
        leader = await self._lead(context)
        ask = ReleaseBatch(
            batch_id=validation.check_id("batch_id", request.batch_id),
            reasons=dict.fromkeys(request.task_ids, request.reason) if request.reason else {},
            reason=request.reason,
        )
        await leader.commits.ask(ask, timeout_s=WRITE_S)
        return pb.ReleaseBatchResponse()

    async def Rewind(self, request: pb.RewindRequest, context: Any) -> pb.RewindResponse:
        """Undo later steps; durable on return."""
        leader = await self._lead(context)
        groups = await leader.commits.ask(
            Rewind(step=request.step, fence=request.fence), timeout_s=WRITE_S
        )
        return pb.RewindResponse(groups=groups)

    async def SetActivity(
        self, request: pb.SetActivityRequest, context: Any
    ) -> pb.SetActivityResponse:
        """Pause, drain or resume the queue."""
        leader = await self._lead(context)
        ask = SetActivity(activity=validation.check_activity(request.activity))
        await leader.commits.ask(ask, timeout_s=WRITE_S)
        return pb.SetActivityResponse()

    async def SetRunnerDraining(
        self, request: pb.SetRunnerDrainingRequest, context: Any
    ) -> pb.SetRunnerDrainingResponse:
        """Drain a runner, or resume it; durable on return."""
        leader = await self._lead(context)
        ask = SetRunnerDraining(
            runner_id=validation.check_id("runner_id", request.runner_id),
            draining=request.draining,
            live={
                one.instance_id: one.metadata.get(START_KEY, "")
                for one in await self._coordinator.all_instances()
                if one.kind == "runner"
            },
        )
        running = await leader.commits.ask(ask, timeout_s=WRITE_S)
        return pb.SetRunnerDrainingResponse(draining=request.draining, running=running)

    async def DropGroups(
        self, request: pb.DropGroupsRequest, context: Any
    ) -> pb.DropGroupsResponse:
        """Tombstone pending groups; durable on return."""
        leader = await self._lead(context)
        checked = validation.check_drop(request)
        ask = DropGroups(
            task_ids=tuple(dict.fromkeys(checked.task_ids)),
            domain=checked.domain,
            scaffold=checked.scaffold,
            reason=checked.reason,
        )
        dropped = await leader.commits.ask(ask, timeout_s=WRITE_S)
        return pb.DropGroupsResponse(dropped=dropped)

    async def RetireShard(
        self, request: pb.RetireShardRequest, context: Any
    ) -> pb.RetireShardResponse:
        """Retire a pool shard, or report the progress."""
        leader = await self._lead(context)
        shard = validation.check_id("pool_shard", request.pool_shard)
        ask = RetireShard(shard=shard, cancel=request.cancel)
        answer: pb.RetireShardResponse = await leader.removals.ask(ask, timeout_s=WRITE_S)
        return answer

    async def DeclareShardLost(
        self, request: pb.DeclareShardLostRequest, context: Any
    ) -> pb.DeclareShardLostResponse:
        """Declare a pool shard lost; durable on return."""
        shard = validation.check_id("pool_shard", request.pool_shard)
        if self.leader is None and self.awaiting_term is not None:
            await self.awaiting_term.declare_lost(shard)
            return pb.DeclareShardLostResponse()
        leader = await self._lead(context)
        answer: pb.DeclareShardLostResponse = await leader.removals.ask(
            DeclareShardLost(shard=shard), timeout_s=LOSE_S
        )
        return answer

    async def GetSchedulerStatus(
        self, request: pb.GetSchedulerStatusRequest, context: Any
    ) -> pb.GetSchedulerStatusResponse:
        """The state of the queue."""
        leader = await self._lead(context)
        status: pb.GetSchedulerStatusResponse = await leader.queue.ask(
            GetStatus(with_tombstones=request.with_tombstones), timeout_s=ASK_S
        )
        status.retirements.extend(leader.members.progress.values())
        return status

    async def GetQueue(self, request: pb.GetQueueRequest, context: Any) -> pb.GetQueueResponse:
        """Positions of the queue."""
        leader = await self._lead(context)
        most = validation.MAX_DETAILED if request.details else validation.MAX_POSITIONS
        ask = GetQueue(
            first_index=request.first_index if request.HasField("first_index") else None,
            before_head=request.before_head,
            positions=validation.check_count("positions", request.positions, most=most),
            details=request.details,
        )
        answer: pb.GetQueueResponse = await leader.queue.ask(ask, timeout_s=ASK_S)
        return answer

    async def ListGroups(
        self, request: pb.ListGroupsRequest, context: Any
    ) -> AsyncIterator[pb.ListGroupsResponse]:
        """Stream the groups of a tag."""
        leader = await self._lead(context)
        async for views in list_groups(
            leader.queue, leader.shards, request.tag, newest=request.newest
        ):
            for group in await with_summaries(leader.shards, views):
                yield pb.ListGroupsResponse(group=fitting([group])[0])

    async def _lead(self, context: Any) -> LeaderContext:
        """The current term; a standby aborts the call."""
        # Checked for every call: during a pause of the process another instance may be elected.
        if self.leader is not None and self.leader.leadership.alive:
            return self.leader
        address = next(
            (i.address for i in self._schedulers.instances if i.metadata.get("leader") == "true"),
            "",
        )
        reason = f"; its last term failed: {self.last_failure}" if self.last_failure else ""
        error = Unavailable(
            f"this scheduler is a standby; the leader is {address or 'not elected'}{reason}",
            retry_after_s=NO_LEADER_RETRY_S,
        )
        trailers = trailing_metadata(error) + (((LEADER_KEY, address),) if address else ())
        await context.abort(*to_status(error), trailers)
        raise AssertionError("abort raises")


def _give_back(leader: LeaderContext, grants: Sequence[Grant]) -> None:
    # Without the message, the leases end by themselves.
    with suppress(MailboxFull, ActorStopped):
        leader.queue.tell(ReturnRollouts(grants=grants))
