"""TrainerService over gRPC. Reads the record and sends messages to the training actor.

Owns no state.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from forge.runtime.actors.actor_system import ActorRef
from forge.v1 import trainer_pb2 as pb
from forge.v1 import trainer_pb2_grpc as rpc
from services.trainer.actors.training import UNBOUNDED_S, SaveCheckpoint
from services.trainer.checkpoint_follower import CheckpointSource
from services.trainer.reporting.run_record import TrainingRecord

FULL_NAME = "forge.v1.TrainerService"
SCOPES = {"GetTrainerStatus": "viewer", "WatchSteps": "viewer", "SaveCheckpoint": "operator"}
AUDITED = frozenset({"SaveCheckpoint"})
"""Changes by people: calls in the audit log."""


class TrainerServicer(rpc.TrainerServiceServicer):
    """Serves status, metrics and checkpoints to operators."""

    def __init__(
        self, record: TrainingRecord, training: ActorRef, source: CheckpointSource
    ) -> None:
        self._record = record
        self._source = source
        self._training = training

    async def GetTrainerStatus(
        self, request: pb.GetTrainerStatusRequest, context: Any
    ) -> pb.GetTrainerStatusResponse:
        """The state of training, with the newest step and evaluation."""
        return self._record.status(with_evaluations=request.with_evaluations)

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
