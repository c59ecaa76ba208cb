"""Wiring of a router, a prefill or a decode instance."""

from __future__ import annotations

from typing import Protocol

from forge.core.errors import ConfigError
from forge.runtime.process.service import ServiceContext
from services.inference.config import InferenceConfig


class _Role(Protocol):
    async def drain(self) -> None: ...

    async def stop(self) -> None: ...


class InferenceApp:
    """One process of one role; its kind in discovery is the role."""

    def __init__(self, context: ServiceContext) -> None:
        config: InferenceConfig = context.config
        if not config.model_path:
            raise ConfigError(
                "model_path is empty: set it to the folder with the model's config.json"
            )
        self.kind = config.role
        self._context = context
        self._role: _Role | None = None

    async def start(self) -> None:
        """Start the role of this process."""
        # Imported by role: a router's host has no torch.
        if self.kind == "router":
            from services.inference.router.role import RouterRole

            self._role = await RouterRole.start(self._context)
        else:
            from services.inference.worker.role import WorkerRole

            self._role = await WorkerRole.start(self._context)

    async def drain(self) -> None:
        """Drain the role."""
        if self._role is not None:
            await self._role.drain()

    async def stop(self) -> None:
        """Stop the role."""
        if self._role is not None:
            await self._role.stop()
