"""TrainerService over gRPC. Reads the record and sends messages to the training actor.

Owns no state.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any

from forge.core.errors import ResourceExhausted
from forge.runtime.actors.actor_system import ActorRef
from forge.runtime.coordination import Instance
from forge.runtime.rpc.interceptor import current_claims
from forge.runtime.weights import ERROR_KEY, WeightHold
from forge.v1 import trainer_pb2 as pb
from forge.v1 import trainer_pb2_grpc as rpc
from services.trainer.actors.steering import Promote, RollBack, StartCanary
from services.trainer.actors.token_values import ReadValues
from services.trainer.actors.training import UNBOUNDED_S, SaveCheckpoint
from services.trainer.leadership.checkpoint_follower import CheckpointSource
from services.trainer.published.quality import Qualities
from services.trainer.published.versions import PublishedVersion, PublishedVersions
from services.trainer.reporting.run_record import TrainingRecord

FULL_NAME = "forge.v1.TrainerService"
SCOPES = {
    "GetTrainerStatus": "viewer",
    "WatchSteps": "viewer",
    "SaveCheckpoint": "operator",
    "ListWeights": "viewer",
    "RollBackWeights": "operator",
    "StartWeightCanary": "operator",
    "PromoteWeights": "operator",
    # Of contents of trajectories, which an administrator alone reads.
    "FetchTokenValues": "admin",
}
AUDITED = frozenset({"SaveCheckpoint", "RollBackWeights", "StartWeightCanary", "PromoteWeights"})
"""Changes by people: calls in the audit log."""

MOST_READS = 4
"""Calls of FetchTokenValues in work: the store has room for the values of further steps."""
READ_S = 30.0
"""Longest wait for the store."""

Workers = Callable[[], Awaitable[Sequence[Instance]]]


class TrainerServicer(rpc.TrainerServiceServicer):
    """Serves status, metrics, checkpoints and the steering of weights to operators."""

    def __init__(
        self,
        record: TrainingRecord,
        training: ActorRef,
        source: CheckpointSource,
        *,
        steering: ActorRef,
        values: ActorRef,
        versions: PublishedVersions,
        workers: Workers,
    ) -> None:
        """`workers` returns the workers in discovery."""
        self._record = record
        self._source = source
        self._training = training
        self._steering = steering
        self._values = values
        self._reads = 0
        self._versions = versions
        self._workers = workers

    async def GetTrainerStatus(
        self, request: pb.GetTrainerStatusRequest, context: Any
    ) -> pb.GetTrainerStatusResponse:
        """The state of training, with the newest step and evaluation."""
        status = self._record.status(with_evaluations=request.with_evaluations)
        hold = _hold(self._versions.hold)
        status.held_weight_version = hold.base_version
        status.canary_weight_version = hold.canary_version
        return status

    async def WatchSteps(
        self, request: pb.WatchStepsRequest, context: Any
    ) -> AsyncIterator[pb.WatchStepsResponse]:
        """Sends the metrics of steps after `after_step`, then of each new step."""
        async with aclosing(self._record.watch(request.after_step)) as steps:
            async for metrics in steps:
                yield pb.WatchStepsResponse(metrics=metrics)

    async def SaveCheckpoint(
        self, request: pb.SaveCheckpointRequest, context: Any
    ) -> pb.SaveCheckpointResponse:
        """Saves a checkpoint now; responds once it is durable."""
        timeout_s = context.time_remaining() or UNBOUNDED_S
        step, path = await self._training.ask(SaveCheckpoint(), timeout_s=timeout_s)
        return pb.SaveCheckpointResponse(step=step, path=path)

    async def FetchCheckpoint(
        self, request: pb.FetchCheckpointRequest, context: Any
    ) -> AsyncIterator[pb.FetchCheckpointResponse]:
        """Sends the files of a checkpoint to a standby."""
        async with aclosing(self._source.send(request)) as responses:
            async for response in responses:
                yield response

    async def ListWeights(
        self, request: pb.ListWeightsRequest, context: Any
    ) -> pb.ListWeightsResponse:
        """The versions, the hold, and the version of each worker."""
        published, hold = self._versions.published, self._versions.hold
        newest = published[-1].announcement if published else None
        workers = []
        for one in await self._workers():
            wanted = hold.wanted(one.instance_id, newest)
            workers.append(
                pb.WeightsWorker(
                    instance_id=one.instance_id,
                    role=one.metadata.get("role", one.kind),
                    weight_version=int(one.metadata.get("weight_version", 0)),
                    wanted_version=wanted.weight_version if wanted is not None else 0,
                    error=one.metadata.get(ERROR_KEY, ""),
                )
            )
        versions = [_published(one, self._versions.qualities) for one in published]
        return pb.ListWeightsResponse(versions=versions, workers=workers, hold=_hold(hold))

    async def RollBackWeights(
        self, request: pb.RollBackWeightsRequest, context: Any
    ) -> pb.RollBackWeightsResponse:
        """Holds one version for all workers."""
        change = RollBack(version=request.weight_version, subject=_subject(request))
        return pb.RollBackWeightsResponse(hold=await self._steer(change, context))

    async def StartWeightCanary(
        self, request: pb.StartWeightCanaryRequest, context: Any
    ) -> pb.StartWeightCanaryResponse:
        """Holds a second version for a share of the workers."""
        change = StartCanary(
            version=request.weight_version, share=request.share, subject=_subject(request)
        )
        return pb.StartWeightCanaryResponse(hold=await self._steer(change, context))

    async def PromoteWeights(
        self, request: pb.PromoteWeightsRequest, context: Any
    ) -> pb.PromoteWeightsResponse:
        """Ends the hold."""
        change = Promote(subject=_subject(request))
        return pb.PromoteWeightsResponse(hold=await self._steer(change, context))

    async def FetchTokenValues(
        self, request: pb.FetchTokenValuesRequest, context: Any
    ) -> AsyncIterator[pb.FetchTokenValuesResponse]:
        """Sends the stored values of a trajectory's tokens."""
        if self._reads >= MOST_READS:
            raise ResourceExhausted(
                f"{self._reads} calls of FetchTokenValues are in progress, the maximum",
                retry_after_s=1.0,
            )
        self._reads += 1
        try:
            timeout_s = min(context.time_remaining() or READ_S, READ_S)
            read = ReadValues(trajectory_id=request.trajectory_id)
            for response in await self._values.ask(read, timeout_s=timeout_s):
                yield response
        finally:
            self._reads -= 1

    async def _steer(
        self, change: RollBack | StartCanary | Promote, context: Any
    ) -> pb.WeightsHold:
        timeout_s = context.time_remaining() or UNBOUNDED_S
        return _hold(await self._steering.ask(change, timeout_s=timeout_s))


def _subject(
    request: pb.RollBackWeightsRequest | pb.StartWeightCanaryRequest | pb.PromoteWeightsRequest,
) -> str:
    """Subject of the call; a service may call on behalf of a person."""
    claims = current_claims()
    if request.on_behalf_of and claims.allows("service"):
        return f"{request.on_behalf_of[:200]} by {claims.subject}"
    return claims.subject


def _hold(hold: WeightHold) -> pb.WeightsHold:
    return pb.WeightsHold(
        base_version=hold.base.weight_version if hold.base is not None else 0,
        canary_version=hold.canary.weight_version if hold.canary is not None else 0,
        canary_workers=hold.canary_workers,
        subject=hold.subject,
        since_unix_s=hold.since_unix_s,
    )


def _published(one: PublishedVersion, qualities: Qualities) -> pb.PublishedWeights:
    quality = qualities.of(one.weight_version)
    return pb.PublishedWeights(
        weight_version=one.weight_version,
        step=one.announcement.step,
        published_unix_s=one.published_unix_s,
        digest=one.announcement.digest,
        total_bytes=one.announcement.total_bytes,
        on_disk=one.on_disk,
        trajectories=quality.trajectories,
        mean_reward=quality.mean_reward if quality.trajectories else 0.0,
        tokens=quality.tokens,
        logprob_gap=quality.logprob_gap if quality.tokens else 0.0,
    )
