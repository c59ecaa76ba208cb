"""Wiring of a router or a worker."""

from __future__ import annotations

from forge.core.errors import ConfigError
from forge.runtime.process.allocator import settle
from forge.runtime.process.service import ServiceContext
from forge.runtime.serving_groups import kind_in
from services.inference.config import InferenceConfig


class InferenceApp:
    """One process of one role; its kind in discovery is the role (decode for both), with its
    serving group."""

    def __init__(self, context: ServiceContext) -> None:
        config: InferenceConfig = context.config
        if not config.model_path:
            raise ConfigError(
                "model_path is empty: set it to the folder with the model's config.json"
            )
        self._role = config.role
        # A worker that also reads prompts is a decode worker to all that do not know the role.
        kind = "decode" if config.role == "both" else config.role
        self.kind = kind_in(config.serving_group, kind)
        self._context = context

    async def start(self) -> None:
        """Start the role of this process."""
        # Imported by role: a router's host has no torch.
        if self._role == "router":
            from services.inference.router.role import start_role
        else:
            from services.inference.worker.role import start_role
        self._drain_role = await start_role(self._context)
        settle()

    async def drain(self) -> None:
        """Drain the role."""
        await self._drain_role()

    async def stop(self) -> None:
        """Nothing is left: the actors have stopped."""
