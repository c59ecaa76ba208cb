"""A task that runs beside the RPCs for as long as the process serves."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from forge.runtime.asyncio_tasks import cancel_and_wait
from forge.runtime.process.service import ServiceContext
from forge.runtime.telemetry import log


class Background:
    """A task without an end: if it ends, the process stops and its log has the cause."""

    def __init__(
        self, context: ServiceContext, coroutine: Coroutine[Any, Any, None], *, name: str
    ) -> None:
        self._context = context
        self._task = asyncio.create_task(coroutine, name=name)
        self._task.add_done_callback(self._ended)

    async def stop(self) -> None:
        """Cancel the task and wait for its end."""
        self._task.remove_done_callback(self._ended)
        await cancel_and_wait(self._task)

    def _ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        log.error("background_task_ended", task=task.get_name(), exc_info=error)
        self._context.stop()
