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


async def trainer_statuses(
    trainers: Remote[TrainerServiceAsyncStub],
) -> AsyncIterator[trainer_pb2.GetTrainerStatusResponse | None]:
    """Yields the status of each registered trainer; None for one that does not answer."""
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
