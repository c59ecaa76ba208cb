"""Calls to the elected leader of the schedulers.

Owns the search for the leader, from an event loop (`scheduler_remote`) and from a thread beside one
(`SyncScheduler`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import grpc

from forge.core.errors import ForgeError, Unavailable
from forge.runtime.coordination import Coordinator, Instance
from forge.runtime.rpc.channel import Channels, blocking_channel
from forge.runtime.rpc.remote import Remote
from forge.runtime.rpc.status import from_rpc_error
from forge.runtime.security.credentials import Security
from forge.v1.scheduler_pb2_grpc import SchedulerServiceStub

if TYPE_CHECKING:
    from forge.v1.scheduler_pb2_grpc import SchedulerServiceAsyncStub

START_KEY = "start_id"
"""Metadata of a runner in discovery: its `LeaseRolloutsRequest.start_id`."""
TERM_ERROR_KEY = "term_error"
"""Metadata of a scheduler: why its last term failed."""


def scheduler_remote(
    coordinator: Coordinator, channels: Channels, *, find_s: float = math.inf
) -> Remote[SchedulerServiceAsyncStub]:
    """Return a client of the schedulers; `find_s` as in `Remote`. Every call needs `where=leads`: a
    leader answers."""
    return Remote(
        coordinator,
        channels,
        kind="scheduler",
        stub=SchedulerServiceStub,
        why_none=_why_none_leads,
        find_s=find_s,
    )


def leads(instance: Instance) -> bool:
    """True if a scheduler is registered as the leader."""
    return instance.metadata.get("leader") == "true"


def awaits_shards(instance: Instance) -> bool:
    """True if an elected scheduler waits for pool shards before it leads."""
    return bool(instance.metadata.get("awaits_shards"))


def _why_none_leads(instances: Sequence[Instance]) -> str:
    failed = [
        f"the last term of {instance.instance_id} failed: {instance.metadata[TERM_ERROR_KEY]}"
        for instance in instances
        if TERM_ERROR_KEY in instance.metadata
    ]
    return "; ".join(["no scheduler leads", *failed]) if instances else ""


class SyncScheduler:
    """Blocking calls to the leader, from one thread beside the event loop.

    Discovery runs on the event loop. While the loop is blocked, its last view may name an ended
    leader: calls then try the other schedulers. Only a leader accepts a call.
    """

    def __init__(self, coordinator: Coordinator, security: Security) -> None:
        """Must be created on the event loop."""
        self._discovery = coordinator.discover("scheduler")
        self._security = security
        self._channels: dict[str, grpc.Channel] = {}

    def call(self, method: str, request: Any, *, timeout_s: float) -> Any:
        """Make one unary call; `timeout_s` applies to each scheduler. Raises `ForgeError`."""
        known = self._discovery.instances
        self._forget({instance.address for instance in known})
        failure: ForgeError | None = None
        for instance in sorted(known, key=leads, reverse=True):
            try:
                return self._ask(instance.address, method, request, timeout_s)
            except ForgeError as error:
                if not error.retryable:
                    raise
                failure = failure or error
        raise failure or Unavailable("no scheduler is known")

    def close(self) -> None:
        """Ends pending calls with `Unavailable`. Callable from any thread."""
        self._forget(set())

    def _ask(self, address: str, method: str, request: Any, timeout_s: float) -> Any:
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = blocking_channel(address, self._security)
        token = (("authorization", f"Bearer {self._security.token_for('SchedulerService')}"),)
        stub = SchedulerServiceStub(channel)
        try:
            return getattr(stub, method)(request, timeout=timeout_s, metadata=token)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        except ValueError as error:
            # grpc raises it for a closed channel.
            raise Unavailable(str(error)) from error

    def _forget(self, addresses: set[str]) -> None:
        """Closes the channels to other addresses."""
        for address in self._channels.keys() - addresses:
            if channel := self._channels.pop(address, None):
                channel.close()
