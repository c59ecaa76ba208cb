"""A worker's entry in discovery while it fetches its first weights.

Routers do not see it. Other workers that start find it and fetch from it, through the same tree as
after a publication, so that the start of a fleet leaves the trainer once or a few times.
"""

from __future__ import annotations

import asyncio

from forge.core.errors import ForgeError
from forge.runtime.process.service import ServiceContext
from forge.runtime.telemetry import log


class DiscoveryEntry:
    """The entry, from the start of the process to its first weights."""

    def __init__(self, context: ServiceContext, *, kind: str) -> None:
        self._context = context
        self._kind = kind
        self._tried = asyncio.Event()
        self._ended = asyncio.Event()

    async def run(self) -> None:
        """Keep the entry until `end`; does nothing without etcd or permission."""
        try:
            address = await self._context.until_listening()
            registration = await self._context.coordinator.register(
                self._kind,
                self._context.config.instance_id,
                address,
                ttl_s=self._context.config.lease_ttl_s,
            )
        except ForgeError as error:
            log.info("start_not_announced", kind=self._kind, error=str(error))
            return
        finally:
            self._tried.set()
        try:
            await self._ended.wait()
        finally:
            await registration.close()

    async def tried(self) -> None:
        """Wait until the entry is there, or cannot be."""
        await self._tried.wait()

    def end(self) -> None:
        """Remove the entry: the process is in discovery, or about to be."""
        self._ended.set()
