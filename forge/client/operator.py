"""Operator calls: submit tasks, watch the services, read results.

Owns batching, retries and the encoding of calls. All calls find their service through etcd, so they
survive the restart of any one instance.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

import grpc
import grpc.aio

from forge.client.retry import retried
from forge.client.reward_events import reward_sum
from forge.client.scheduler import awaits_shards, leads, scheduler_remote
from forge.runtime.coordination import Coordinator, Login
from forge.runtime.rpc.channel import Channels
from forge.runtime.rpc.chunks import chunked
from forge.runtime.rpc.remote import Remote
from forge.runtime.rpc.status import from_rpc_error
from forge.runtime.rpc.streams import flowing
from forge.runtime.security.credentials import Security
from forge.v1 import common_pb2, inference_pb2, scheduler_pb2, trainer_pb2
from forge.v1.inference_pb2_grpc import InferenceServiceStub
from forge.v1.trainer_pb2_grpc import TrainerServiceStub

BATCH_TASKS = 256
BATCH_BYTES = 2 << 20
"""Most bytes of one SubmitTasks call; one task may have up to 1 MiB."""
RECONNECT_S = 0.5
SOLVED_OUTCOME = 1.0 - 1e-6
"""Outcome of a solved task: 1, up to the rounding of a sum."""
LOOK_PAUSE = 9.0
"""Pause between two polls of a tag, in multiples of the time of a poll: thousands of groups take
a second of the scheduler."""
LOSE_S = 600.0
"""Deadline of DeclareShardLost, which stores a record for each group in memory."""
LIST_SILENCE_S = 30.0
"""Longest silence in a list of groups, which may be long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DomainResult:
    """Results of the rollouts of one domain under one tag."""

    domain: str
    rollouts: int
    failed: int
    """Abandoned rollouts; they count as outcome 0."""
    mean_outcome: float
    solved: int
    """Rollouts whose outcome is 1, or more."""
    sampled_tokens: int
    """Tokens of all turns of the sealed rollouts."""
    min_weight_version: int
    max_weight_version: int
    """Over the sampled tokens; -1 if there are none."""
    task_outcomes: Mapping[str, float]
    """Mean outcome of each task's rollouts, by task id."""


class Operator:
    """A connection to the whole system."""

    def __init__(
        self,
        coordinator: Coordinator,
        channels: Channels,
        *,
        retry_for_s: float = 30.0,
        find_s: float = math.inf,
    ) -> None:
        """`retry_for_s` and `find_s` are those of every call (`Remote`)."""
        self._coordinator = coordinator
        self._channels = channels
        self._retry_for_s = retry_for_s
        self._scheduler = scheduler_remote(coordinator, channels, find_s=find_s)
        self._inference = Remote(
            coordinator, channels, kind="router", stub=InferenceServiceStub, find_s=find_s
        )
        self._trainer = Remote(
            coordinator, channels, kind="trainer", stub=TrainerServiceStub, find_s=find_s
        )

    @classmethod
    async def connect(
        cls, endpoints: str, *, cluster: str, security: Security, login: Login | None = None
    ) -> Self:
        """Connects through etcd. Raises `Unavailable` if etcd does not answer."""
        coordinator = await Coordinator.connect(
            endpoints,
            cluster=cluster,
            credentials=security.etcd_credentials(endpoints),
            login=login,
            signatures=security,
        )
        return cls(coordinator, Channels(security))

    async def close(self) -> None:
        """Closes all connections."""
        await self._channels.close()
        await self._coordinator.close()

    async def submit(self, tasks: Iterable[common_pb2.Task]) -> int:
        """Submit tasks in bounded calls; return the number of new ones. All are durable then."""
        accepted = 0
        for batch in batches(tasks):
            request = scheduler_pb2.SubmitTasksRequest(tasks=batch)
            response = await self._ask_scheduler("SubmitTasks", request, timeout_s=30.0)
            accepted += response.accepted
        return accepted

    async def scheduler_status(
        self, *, with_tombstones: bool = False
    ) -> scheduler_pb2.GetSchedulerStatusResponse:
        """Return queue, window and counters; `with_tombstones`: also reasons of tombstones."""
        request = scheduler_pb2.GetSchedulerStatusRequest(with_tombstones=with_tombstones)
        status: scheduler_pb2.GetSchedulerStatusResponse = await self._ask_scheduler(
            "GetSchedulerStatus", request, timeout_s=5.0
        )
        return status

    async def set_activity(self, activity: scheduler_pb2.Activity.ValueType) -> None:
        """Pauses, drains or resumes the queue; later leaders keep it."""
        request = scheduler_pb2.SetActivityRequest(activity=activity)
        await self._ask_scheduler("SetActivity", request, timeout_s=5.0)

    async def set_runner_draining(
        self, runner_id: str, draining: bool, *, on_behalf_of: str = ""
    ) -> int:
        """Leases no further rollout to a runner, or leases again; returns the number of its leases.
        Raises `NotFound` for a runner that is not in discovery."""
        request = scheduler_pb2.SetRunnerDrainingRequest(
            runner_id=runner_id, draining=draining, on_behalf_of=on_behalf_of
        )
        answer = await self._ask_scheduler("SetRunnerDraining", request, timeout_s=10.0)
        return int(answer.running)

    async def drop_groups(
        self, task_ids: Iterable[str] = (), *, domain: str = "", scaffold: str = "", reason: str
    ) -> int:
        """Tombstones pending groups, by task id or of a domain; returns their number."""
        request = scheduler_pb2.DropGroupsRequest(
            task_ids=task_ids, domain=domain, scaffold=scaffold, reason=reason
        )
        response = await self._ask_scheduler("DropGroups", request, timeout_s=60.0)
        return int(response.dropped)

    async def retire_shard(
        self, shard: str, *, cancel: bool = False
    ) -> scheduler_pb2.RetireShardResponse:
        """Starts or cancels the retirement of a pool shard; its progress."""
        request = scheduler_pb2.RetireShardRequest(pool_shard=shard, cancel=cancel)
        answer: scheduler_pb2.RetireShardResponse = await self._ask_scheduler(
            "RetireShard", request, timeout_s=60.0
        )
        return answer

    async def declare_shard_lost(self, shard: str) -> scheduler_pb2.DeclareShardLostResponse:
        """Declares a pool shard lost, also while an elected scheduler waits for it."""
        answer: scheduler_pb2.DeclareShardLostResponse = await self._scheduler.call(
            "DeclareShardLost",
            scheduler_pb2.DeclareShardLostRequest(pool_shard=shard),
            timeout_s=LOSE_S,
            retry_for_s=self._retry_for_s,
            where=lambda instance: leads(instance) or awaits_shards(instance),
        )
        return answer

    async def inference_status(self) -> inference_pb2.GetInferenceStatusResponse:
        """Return models and load of inference."""
        request = inference_pb2.GetInferenceStatusRequest()
        status: inference_pb2.GetInferenceStatusResponse = await self._inference.call(
            "GetInferenceStatus", request, timeout_s=5.0, retry_for_s=self._retry_for_s
        )
        return status

    async def trainer_status(
        self, *, with_evaluations: bool = False
    ) -> trainer_pb2.GetTrainerStatusResponse:
        """Return the progress of training; `with_evaluations`: also all evaluations, in brief."""
        request = trainer_pb2.GetTrainerStatusRequest(with_evaluations=with_evaluations)
        status: trainer_pb2.GetTrainerStatusResponse = await self._trainer.call(
            "GetTrainerStatus", request, timeout_s=5.0, retry_for_s=self._retry_for_s
        )
        return status

    async def queue(
        self,
        *,
        first_index: int | None = None,
        before_head: int = 0,
        positions: int,
        details: bool = False,
    ) -> scheduler_pb2.GetQueueResponse:
        """Return positions of the training queue, from `first_index` or from before the head on."""
        request = scheduler_pb2.GetQueueRequest(
            first_index=first_index, before_head=before_head, positions=positions, details=details
        )
        answer: scheduler_pb2.GetQueueResponse = await self._ask_scheduler(
            "GetQueue", request, timeout_s=5.0
        )
        return answer

    async def groups(self, tag: str) -> AsyncIterator[scheduler_pb2.BatchGroup]:
        """Yields the groups of `tag` with their trajectories' rewards, each once."""
        for group in await retried(lambda: self._list_groups(tag), retry_for_s=self._retry_for_s):
            yield group

    async def newest_groups(
        self, tag: str, *, most: int
    ) -> tuple[list[scheduler_pb2.BatchGroup], bool]:
        """Return the last submitted groups of `tag`, or of all, up to `most`, with their
        trajectories' rewards, and whether these are all."""
        _, stub = await self._scheduler.pick(where=leads)
        # One more, to know whether there are more.
        call = stub.ListGroups(scheduler_pb2.ListGroupsRequest(tag=tag, newest=most + 1))
        found: list[scheduler_pb2.BatchGroup] = []
        try:
            async for response in flowing(call, silence_s=LIST_SILENCE_S, source="the scheduler"):
                found.append(response.group)
                if len(found) > most:
                    break
        finally:
            call.cancel()
        return found[-most:], len(found) <= most

    async def results(self, tag: str) -> list[DomainResult]:
        """Return the results of the ended groups of `tag`, by domain name."""
        return domain_results([group async for group in self.groups(tag) if ended(group)])

    async def all_ended(
        self,
        tag: str,
        *,
        groups: int,
        poll_s: float,
        on_look: Callable[[int], Awaitable[None]] | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> list[DomainResult]:
        """Results of `tag` once `groups` groups have ended. Polls every `poll_s`, or less often if
        a list takes long; `on_look` gets the number of ended groups after each."""

        async def look() -> tuple[list[scheduler_pb2.BatchGroup], float]:
            # The time of one attempt: an outage before it does not slow the polls.
            began_s = clock()
            listed = await self._list_groups(tag)
            return [group for group in listed if ended(group)], clock() - began_s

        while True:
            done, took_s = await retried(look, retry_for_s=self._retry_for_s)
            if on_look is not None:
                await on_look(len(done))
            if len(done) >= groups:
                return domain_results(done)
            await sleep(max(poll_s, LOOK_PAUSE * took_s))

    async def tail(self, *, after_step: int = 0) -> AsyncIterator[trainer_pb2.StepMetrics]:
        """Yields metrics of every step after `after_step`, then live ones, without end.

        Steps that a restarted trainer repeats are not yielded again. Raises the `ForgeError` of a
        trainer that stays unreachable.
        """
        while True:
            _, stub = await retried(self._trainer.pick, retry_for_s=self._retry_for_s)
            call = stub.WatchSteps(trainer_pb2.WatchStepsRequest(after_step=after_step))
            try:
                async for response in call:
                    after_step = response.metrics.step
                    yield response.metrics
            except grpc.aio.AioRpcError as error:
                translated = from_rpc_error(error)
                if not translated.retryable:
                    raise translated from error
            finally:
                call.cancel()
            await asyncio.sleep(RECONNECT_S)

    async def _ask_scheduler(self, method: str, request: Any, *, timeout_s: float) -> Any:
        return await self._scheduler.call(
            method, request, timeout_s=timeout_s, retry_for_s=self._retry_for_s, where=leads
        )

    async def _list_groups(self, tag: str) -> list[scheduler_pb2.BatchGroup]:
        _, stub = await self._scheduler.pick(where=leads)
        call = stub.ListGroups(scheduler_pb2.ListGroupsRequest(tag=tag))
        listed = flowing(call, silence_s=LIST_SILENCE_S, source="the scheduler")
        return [response.group async for response in listed]


def batches(tasks: Iterable[common_pb2.Task]) -> Iterator[list[common_pb2.Task]]:
    """Groups tasks for SubmitTasks calls."""
    size_of = common_pb2.Task.ByteSize
    return chunked(tasks, size_of=size_of, max_items=BATCH_TASKS, max_bytes=BATCH_BYTES)


def ended(group: scheduler_pb2.BatchGroup) -> bool:
    """True if no rollout of the group will change."""
    return group.group.state != common_pb2.GROUP_STATE_PENDING


def domain_results(groups: Iterable[scheduler_pb2.BatchGroup]) -> list[DomainResult]:
    """Results of ended groups, by domain name."""
    by_domain: dict[str, list[scheduler_pb2.BatchGroup]] = defaultdict(list)
    for group in groups:
        by_domain[group.group.task.domain].append(group)
    return [_domain_result(domain, of_it) for domain, of_it in sorted(by_domain.items())]


def _domain_result(domain: str, groups: Iterable[scheduler_pb2.BatchGroup]) -> DomainResult:
    sealed: list[common_pb2.TrajectorySummary] = []
    failed = 0
    task_outcomes: dict[str, float] = {}
    for group in groups:
        task = group.group.task
        ended_well = [each for each in group.trajectories if _sealed(each)]
        attempts = max(task.group_size, len(ended_well))
        failed += attempts - len(ended_well)
        sealed += ended_well
        task_outcomes[task.task_id] = sum(map(_outcome, ended_well)) / attempts
    outcomes = [_outcome(each) for each in sealed]
    rollouts = len(sealed) + failed
    sampled = [each for each in sealed if each.sampled_tokens]
    return DomainResult(
        domain=domain,
        rollouts=rollouts,
        failed=failed,
        mean_outcome=sum(outcomes) / rollouts,
        solved=sum(outcome >= SOLVED_OUTCOME for outcome in outcomes),
        sampled_tokens=sum(each.sampled_tokens for each in sealed),
        min_weight_version=min((each.min_weight_version for each in sampled), default=-1),
        max_weight_version=max((each.max_weight_version for each in sampled), default=-1),
        task_outcomes=task_outcomes,
    )


def _outcome(trajectory: common_pb2.TrajectorySummary) -> float:
    return reward_sum(trajectory.rewards) or 0.0


def _sealed(trajectory: common_pb2.TrajectorySummary) -> bool:
    return trajectory.state == common_pb2.TRAJECTORY_STATE_SEALED
