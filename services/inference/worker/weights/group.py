"""The group in which this worker receives a version together with others, by torch.distributed.

Owns joining the group and the check of what arrives. Not here: the broadcast
(`forge.rl.file_broadcast`); the fetch of what is missing after a failure (`fetch`).
"""

from __future__ import annotations

import asyncio
import mmap
import os
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from forge.core.errors import DataLoss, ForgeError
from forge.core.named_tensor import NamedTensor
from forge.runtime.process.service import ServiceContext
from forge.runtime.rpc import translated
from forge.runtime.rpc.channel import Channels
from forge.runtime.telemetry import log
from forge.runtime.weights import TensorEntry, WeightAnnouncement
from forge.runtime.weights.assembly import WeightAssembly
from forge.runtime.weights.group_process import GROUP_KEY, GroupError, GroupProcess, group_way
from forge.runtime.weights.version_files import starts_of, verified_tensor
from forge.v1 import inference_pb2 as pb
from forge.v1 import inference_pb2_grpc as rpc
from services.inference.worker.metrics import GROUP_FALLBACKS

_ANSWER_S = 10.0
"""Time for the trainer's answer after the others had theirs to join."""


class GroupMember:
    """Joins the groups of a trainer."""

    def __init__(self, process: GroupProcess, channels: Channels, *, instance_id: str) -> None:
        self.process = process
        self._channels = channels
        self._instance_id = instance_id

    async def __aenter__(self) -> Self:
        """Prepare for the first group."""
        self.process.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.process.close()

    async def receive(
        self,
        announced: WeightAnnouncement,
        entries: Sequence[TensorEntry],
        assembly: WeightAssembly,
        progress: Callable[[], object],
    ) -> bool:
        """Receive the tensors into an empty assembly; call `progress` after some of them. Returns
        whether a group received the version; without, the verified tensors before a failure
        stay."""
        if group_way(self.process.settings.backend) not in announced.ways:
            return False
        try:
            if not self.process.ready:
                self.process.revive()
                raise _NotReceived("not_ready", "the process for groups is not ready")
            await self._receive(announced, entries, assembly, progress)
        except _NotReceived as error:
            GROUP_FALLBACKS.labels(error.reason).inc()
            log.info(
                "weight_group_left",
                weight_version=announced.weight_version,
                received_tensors=len(assembly.tensors),
                reason=error.reason,
                error=str(error),
            )
        return assembly.complete

    async def _receive(
        self,
        announced: WeightAnnouncement,
        entries: Sequence[TensorEntry],
        assembly: WeightAssembly,
        progress: Callable[[], object],
    ) -> None:
        seat = await self._join(announced)
        *starts, size_bytes = starts_of([one.size_bytes for one in entries])
        places = [
            range(start, start + one.size_bytes) for one, start in zip(entries, starts, strict=True)
        ]
        file, damage = os.memfd_create("forge-weights"), None
        try:
            os.truncate(file, size_bytes)
            data = memoryview(mmap.mmap(file, size_bytes, prot=mmap.PROT_READ))

            async def observe(answer: Mapping[str, Any]) -> None:
                nonlocal damage
                received = data[: answer.get("received_bytes", 0)]
                if damage is None:
                    damage = await _take(received, entries, places, assembly)
                    progress()

            host = announced.source.rpartition(":")[0].strip("[]")
            order = {
                "address": (host, seat.port),
                "rank": seat.rank,
                "ranks": seat.ranks,
                "size_bytes": size_bytes,
            }
            await self.process.broadcast(file, order, observe)
        except GroupError as error:
            raise _NotReceived("failed", str(error)) from None
        except OSError as error:
            raise _NotReceived("failed", f"no memory for the version: {error}") from None
        finally:
            os.close(file)
        # Not earlier: without this member the others would lose the rest.
        if damage is not None:
            raise _NotReceived("damaged", str(damage))

    async def _join(self, announced: WeightAnnouncement) -> pb.JoinGroupResponse:
        stub = self._channels.stub(rpc.WeightServiceStub, announced.source)
        request = pb.JoinGroupRequest(
            weight_version=announced.weight_version, instance_id=self._instance_id
        )
        limit_s = self.process.settings.join_s + _ANSWER_S
        try:
            async with translated():
                return await stub.JoinGroup(request, timeout=limit_s)
        except ForgeError as error:
            raise _NotReceived("refused", str(error)) from None


def group_member(context: ServiceContext) -> GroupMember | None:
    """Return this worker's part in groups; None if they are off. The backend is in discovery while
    the worker can join, so that no group waits for one whose process starts."""
    config = context.config
    backend = config.weight_group.backend
    if backend == "off":
        return None

    async def announce(can_join: bool) -> None:
        if can_join:
            context.metadata[GROUP_KEY] = backend
        elif context.metadata.pop(GROUP_KEY, None) is None:
            return
        await context.announce()

    host = (config.advertise_host or config.host).strip("[]")
    process = GroupProcess(config.weight_group, host=host, device=config.device, announce=announce)
    return GroupMember(process, context.channels, instance_id=config.instance_id)


class _NotReceived(Exception):
    """The group does not receive the version here."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


async def _take(
    received: memoryview,
    entries: Sequence[TensorEntry],
    places: Sequence[range],
    assembly: WeightAssembly,
) -> DataLoss | None:
    """Add the tensors whose `places` are received; return the error of a damaged one, which is not
    added."""
    first, verified = len(assembly.tensors), list[NamedTensor]()
    last = bisect_right(places, len(received), lo=first, key=lambda place: place.stop)

    def verify() -> DataLoss | None:
        for entry, place in zip(entries[first:last], places[first:last], strict=True):
            try:
                verified.append(verified_tensor(entry, received[place.start : place.stop]))
            except DataLoss as error:
                return error
        return None

    damage = await asyncio.to_thread(verify)
    assembly.take(verified)
    return damage
