"""Groups of workers that receive the newest version together, from this trainer's host.

    announced -> joined (the first worker) -> closed after `join_s`, or with all workers -> sent

Owns the members of a group. Publication and training never wait for one: a worker that is late, and
all after a failure, fetch what they miss. Not here: the broadcast (`forge.rl.file_broadcast`).
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from forge.core.errors import FailedPrecondition
from forge.runtime.concurrency.tasks import cancel_and_wait
from forge.runtime.files import host_memory
from forge.runtime.telemetry import log
from forge.runtime.weights import MEMORY_KEY
from forge.runtime.weights.group_process import GROUP_KEY, GroupError, GroupProcess, group_way
from forge.v1.inference_pb2 import JoinGroupResponse
from services.trainer.metrics import WEIGHT_GROUP_MEMBERS, WEIGHT_GROUPS
from services.trainer.published.local_copies import Workers

_LOOK_S = 0.25
Place = asyncio.Future[JoinGroupResponse]


@dataclass(slots=True, kw_only=True, eq=False)
class _Group:
    """The group of one version."""

    version: int
    file: int
    """Descriptor of the file with all tensors."""
    places: dict[str, Place] = field(default_factory=dict)
    """By instance id, in the order in which they joined."""
    joined: asyncio.Event = field(default_factory=asyncio.Event)
    run: asyncio.Task[None] | None = None
    """From the first worker that joins on."""
    began_s: float = 0.0
    open: bool = True
    """Workers may join."""
    outcome: Literal["not_formed", "failed", "complete"] = "not_formed"
    reason: str = ""


class WeightGroups:
    """The group of the newest version."""

    def __init__(self, process: GroupProcess, *, host: str, workers: Workers) -> None:
        """`host`: address of this host for the workers; `workers` returns those in discovery."""
        self._process = process
        self._host = host
        self._workers = workers
        self._group: _Group | None = None
        self._runs: set[asyncio.Task[None]] = set()
        self.way = group_way(process.settings.backend)
        """Of announcements."""

    def start(self) -> None:
        """Prepare for the first group."""
        self._process.start()

    async def close(self) -> None:
        """End the group."""
        self._drop()
        await cancel_and_wait(*self._runs)
        await self._process.close()

    def offer(self, version: int, file: int) -> None:
        """Take the file of the newest version, and close the descriptor later. A group that has not
        begun to send the version before never will."""
        self._drop()
        self._group = _Group(version=version, file=file)

    async def join(self, version: int, instance_id: str) -> JoinGroupResponse:
        """Return the place of a worker once the members are known. Raises `FailedPrecondition`
        without a group, or if it has formed."""
        group = self._group
        self._process.revive()
        if group is None or group.version != version or not group.open or not self._process.started:
            raise FailedPrecondition(f"no group forms for weights {version}")
        place: Place = asyncio.get_running_loop().create_future()
        if (before := group.places.get(instance_id)) is not None:
            before.cancel()
        group.places[instance_id] = place
        group.joined.set()
        if group.run is None:
            group.began_s = time.monotonic()
            group.run = asyncio.create_task(self._run(group), name="weight-group")
            self._runs.add(group.run)
            group.run.add_done_callback(partial(self._ended, group))
        try:
            return await place
        finally:
            if group.open and group.places.get(instance_id) is place:
                del group.places[instance_id]

    def _drop(self) -> None:
        """Forget a group unless it sends."""
        group, self._group = self._group, None
        if group is None or not group.open:
            return
        group.open = False
        if group.run is None:
            os.close(group.file)
        else:
            group.run.cancel()

    async def _run(self, group: _Group) -> None:
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._process.settings.join_s):
                    await self._gathered(group)
            group.open, group.outcome = False, "failed"
            WEIGHT_GROUP_MEMBERS.set(len(group.places))
            await self._send(group)
            group.outcome = "complete"
        except GroupError as error:
            group.reason = str(error)

    def _ended(self, group: _Group, run: asyncio.Task[None]) -> None:
        self._runs.discard(run)
        group.open = False
        os.close(group.file)
        for place in group.places.values():
            if not place.done():
                place.set_exception(FailedPrecondition("the group has not formed"))
        WEIGHT_GROUPS.labels(group.outcome).inc()
        log.info(
            "weight_group_ended",
            weight_version=group.version,
            outcome=group.outcome,
            members=len(group.places),
            group_s=round(time.monotonic() - group.began_s, 3),
            reason=group.reason,
        )

    async def _gathered(self, group: _Group) -> None:
        """Wait until all workers have joined that can."""
        while True:
            group.joined.clear()
            here, backend = host_memory.place(), self._process.settings.backend
            awaited = {
                one.instance_id
                for one in await self._workers()
                if one.metadata.get(GROUP_KEY) == backend and one.metadata.get(MEMORY_KEY) != here
            }
            if not awaited:
                raise GroupError("no worker in discovery joins groups: a fleet that starts fetches")
            if awaited <= group.places.keys():
                return
            # A worker may also leave discovery.
            with suppress(TimeoutError):
                await asyncio.wait_for(group.joined.wait(), _LOOK_S)

    async def _send(self, group: _Group) -> None:
        places = list(group.places.values())
        if not places:
            raise GroupError("no worker is left")

        async def observe(answer: Mapping[str, Any]) -> None:
            if (port := answer.get("port")) is None:
                return
            for rank, place in enumerate(places, 1):
                if not place.done():
                    place.set_result(JoinGroupResponse(port=port, rank=rank, ranks=len(places) + 1))

        order = {
            "address": (self._host, 0),
            "rank": 0,
            "ranks": len(places) + 1,
            "size_bytes": os.fstat(group.file).st_size,
        }
        await self._process.broadcast(group.file, order, observe)
