"""The status of the registered trainers, as the pool needs it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from forge.core.errors import ForgeError
from forge.runtime.rpc.remote import Remote
from forge.runtime.rpc.status import translated
from forge.runtime.telemetry import log
from forge.v1 import trainer_pb2

if TYPE_CHECKING:
    from forge.v1.trainer_pb2_grpc import TrainerServiceAsyncStub

_ASK_TRAINER_S = 5.0


async def trained_step(trainers: Remote[TrainerServiceAsyncStub]) -> int | None:
    """The newest step of all registered trainers that have found their checkpoint; None if none
    answers, or each still loads."""
    steps = [
        status.step
        async for status in _statuses(trainers)
        if status is not None and status.phase > trainer_pb2.TRAINER_PHASE_LOADING
    ]
    return max(steps, default=None)


async def covered_step(trainers: Remote[TrainerServiceAsyncStub]) -> int:
    """The oldest checkpoint step of all registered trainers; 0 if there is none, or one does not
    answer."""
    steps = [
        status.oldest_checkpoint_step if status is not None else 0
        async for status in _statuses(trainers)
    ]
    return min(steps, default=0)


async def _statuses(
    trainers: Remote[TrainerServiceAsyncStub],
) -> AsyncIterator[trainer_pb2.GetTrainerStatusResponse | None]:
    """None for a trainer that does not answer."""
    for instance in trainers.instances():
        status = None
        try:
            async with translated():
                status = await trainers.stub(instance).GetTrainerStatus(
                    trainer_pb2.GetTrainerStatusRequest(), timeout=_ASK_TRAINER_S
                )
        except ForgeError as error:
            log.debug("trainer_not_reached", trainer=instance.instance_id, error=str(error))
        yield status
