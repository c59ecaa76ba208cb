"""Ends the worker when a process of vLLM ends or hangs; the worker's supervisor then starts both.

Not here: the rule for a hang (`hang_watch`), the processes (`processes`).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, Protocol, Self

from forge.runtime.actors.actor import Actor
from forge.runtime.actors.actor_system import ActorRef, ActorSystem
from forge.runtime.actors.supervision import Restart
from forge.runtime.concurrency.tasks import cancel_and_wait
from forge.runtime.telemetry import log
from services.inference.engines.vllm.hang_watch import Limits, Progress, hung

_NEVER_RESTART = Restart(max_restarts=0)
_WATCH_S = 0.2


class Watched(Protocol):
    """vLLM's processes; see `Processes`."""

    @property
    def ended(self) -> bool:
        """True if one of the processes has ended."""

    async def ask(self) -> object:
        """Return as soon as the scheduler is between two steps."""

    def used_s(self) -> float:
        """CPU seconds of all that run."""

    def kill(self) -> None:
        """Kill all processes, also suspended ones."""

    def why_ended(self) -> str:
        """Return a text about the end of the processes and its cause."""


@dataclass(frozen=True, slots=True)
class _Ended:
    """vLLM is lost."""

    reason: str


class _Owner(Actor):
    """Fails for good: the worker ends."""

    async def receive(self, message: Any) -> Any:
        """Raise the reason."""
        match message:
            case _Ended(reason):
                raise RuntimeError(reason)
            case _:
                return await super().receive(message)


class ProcessWatch:
    """Watches until closed."""

    def __init__(self, processes: Watched, owner: ActorRef, limits: Limits) -> None:
        self.progress = Progress()
        self.lost = False
        """The worker ends."""
        self._processes = processes
        self._owner = owner
        self._tasks = (
            asyncio.create_task(self._await_end()),
            asyncio.create_task(self._await_hang(limits)),
        )

    @classmethod
    async def start(cls, actors: ActorSystem, processes: Watched, limits: Limits) -> Self:
        """Watch from now on."""
        owner = await actors.spawn(_Owner, name="vllm", restart=_NEVER_RESTART)
        return cls(processes, owner, limits)

    def end(self, reason: str) -> None:
        """End the worker."""
        self.lost = True
        if self._owner.alive:
            self._owner.tell(_Ended(reason))

    async def close(self) -> None:
        """Stop watching."""
        await cancel_and_wait(*self._tasks)

    async def _await_end(self) -> None:
        # vLLM reports its end only to requests; an idle worker must end, too.
        while not self._processes.ended:  # noqa: ASYNC110
            await asyncio.sleep(_WATCH_S)
        self.end(self._processes.why_ended())

    async def _await_hang(self, limits: Limits) -> None:
        processes = self._processes
        reached = await hung(self.progress, processes.ask, processes.used_s, limits)
        is_idle = reached == "vllm.silence_s"
        limit_s = limits.silence_s if is_idle else limits.working_s
        work = "an update" if self.progress.updates else "requests"
        log.error("vllm_hangs", limit=reached, limit_s=limit_s, work=work)
        used = ", and its processes used no CPU time" if is_idle else ""
        self.end(
            f"vLLM hangs: during {work} there was no token and no answer of its scheduler{used}, "
            f"for {reached} = {limit_s:g}"
        )
        # Its requests fail at once, and the router places them again.
        processes.kill()
