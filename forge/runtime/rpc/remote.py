"""Calls to any instance of a kind that is in discovery.

Owns the choice of the instance and the retry of unary calls: every write in Forge is idempotent, so
a call with an unknown outcome is repeated. Not here: the recovery of streams.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import grpc.aio

from forge.core.errors import ForgeError, Unavailable
from forge.runtime.concurrency.backoff import Backoff
from forge.runtime.rpc.channel import Channels
from forge.runtime.rpc.status import from_rpc_error
from forge.runtime.telemetry import counter, log

if TYPE_CHECKING:
    from forge.runtime.coordination import Coordinator, Instance

Stub = TypeVar("Stub")

_RETRIES = counter(
    "forge_rpc_retries_total", "Calls retried, by kind of the called service.", ["kind"]
)


class Remote(Generic[Stub]):
    """A client of the instances of one kind."""

    def __init__(
        self,
        coordinator: Coordinator,
        channels: Channels,
        *,
        kind: str,
        stub: Callable[[grpc.aio.Channel], Stub],
        why_none: Callable[[Sequence[Instance]], str] | None = None,
        find_s: float = math.inf,
    ) -> None:
        """`why_none` returns, from all instances of the kind, the reason that none fits; "" if
        unknown. `find_s`: longest wait of an attempt for an instance, within its timeout; it
        begins with the first view of etcd."""
        self._why_none = why_none
        self._find_s = find_s
        self._discovery = coordinator.discover(kind)
        self._channels = channels
        self._kind = kind
        self._make_stub = stub
        self._random = random.Random()

    def instances(self) -> tuple[Instance, ...]:
        """The instances of the kind, as last known."""
        return self._discovery.instances

    def stub(self, instance: Instance) -> Stub:
        """Return the stub of an instance."""
        return self._channels.stub(self._make_stub, instance.address)

    async def pick(
        self, *, where: Callable[[Instance], bool] | None = None, timeout_s: float = 10.0
    ) -> tuple[Instance, Stub]:
        """Wait for an instance; return it and its stub. Raises Unavailable."""
        return await self._pick(where, timeout_s, frozenset())

    async def call(
        self,
        method: str,
        request: Any,
        *,
        timeout_s: float,
        retry_for_s: float = 0.0,
        where: Callable[[Instance], bool] | None = None,
    ) -> Any:
        """Make a unary call; retry it on another instance after a retryable error.

        `timeout_s` limits one attempt, with the wait for an instance; no attempt begins after
        `retry_for_s`. Raises the ForgeError of the last attempt.
        """
        give_up_s = time.monotonic() + retry_for_s
        failed: set[str] = set()
        backoff = Backoff(0.05, 2.0)
        while True:
            try:
                return await self._attempt(method, request, timeout_s, where, failed)
            except ForgeError as error:
                pause_s = max(self._random.uniform(0, backoff.next_s()), error.retry_after_s or 0.0)
                if not error.retryable or time.monotonic() + pause_s >= give_up_s:
                    raise
                log.debug("rpc_retried", kind=self._kind, method=method, error=str(error))
            _RETRIES.labels(self._kind).inc()
            await asyncio.sleep(pause_s)

    async def _attempt(
        self,
        method: str,
        request: Any,
        timeout_s: float,
        where: Callable[[Instance], bool] | None,
        failed: set[str],
    ) -> Any:
        started_s = time.monotonic()
        instance, stub = await self._pick(where, timeout_s, failed)
        left_s = max(0.001, timeout_s - (time.monotonic() - started_s))
        try:
            return await getattr(stub, method)(request, timeout=left_s)
        except grpc.aio.AioRpcError as error:
            failed.add(instance.instance_id)
            raise from_rpc_error(error) from error

    async def _pick(
        self,
        where: Callable[[Instance], bool] | None,
        timeout_s: float,
        failed: frozenset[str] | set[str],
    ) -> tuple[Instance, Stub]:
        try:
            if self._find_s < timeout_s:
                with suppress(TimeoutError):
                    async with asyncio.timeout(timeout_s - self._find_s):
                        await self._discovery.known()
            wait_s = min(timeout_s, self._find_s)
            fitting = await self._discovery.wait(timeout_s=wait_s, where=where)
        except Unavailable as error:
            reason = self._why_none(self.instances()) if self._why_none else ""
            if not reason:
                raise
            raise Unavailable(f"{error}: {reason}") from error
        # An instance that failed this call is the last choice.
        fresh = [instance for instance in fitting if instance.instance_id not in failed]
        instance = self._random.choice(fresh or fitting)
        return instance, self.stub(instance)
