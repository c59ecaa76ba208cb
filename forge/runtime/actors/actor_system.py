"""The actors of one process: spawn, address, stop.

Owns addresses and the registry. Not here: the actor (`forge.runtime.actors.actor`), its queue
(`forge.runtime.actors.mailbox`), its restarts (`forge.runtime.actors.supervision`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from forge.core.errors import DeadlineExceeded, FailedPrecondition
from forge.runtime.actors.actor import Actor, ThreadActor
from forge.runtime.actors.mailbox import Envelope
from forge.runtime.actors.supervision import DEFAULT_RESTART, Cell, LoopCell, Restart, ThreadCell
from forge.runtime.telemetry import log


class ActorRef:
    """The address of an actor; others hold nothing else of it."""

    __slots__ = ("_cell", "_mailbox", "name")

    def __init__(self, cell: Cell) -> None:
        self.name = cell.name
        self._cell = cell
        self._mailbox = cell.mailbox

    @property
    def alive(self) -> bool:
        """Whether the actor still takes messages."""
        return not self._mailbox.closed

    async def ask(self, message: Any, *, timeout_s: float) -> Any:
        """Return the actor's answer, or raise its exception. Raises MailboxFull, ActorStopped,
        DeadlineExceeded (the outcome is then unknown)."""
        loop = asyncio.get_running_loop()
        reply: asyncio.Future[Any] = loop.create_future()
        envelope = Envelope(message, reply)
        self._mailbox.put(envelope)
        deadline = loop.call_later(timeout_s, self._expire, envelope, timeout_s)
        try:
            return await reply
        finally:
            deadline.cancel()
            # An error's traceback has this frame; with the answer in it, both wait for the
            # garbage collector, and the message with them.
            del envelope, reply

    def tell(self, message: Any) -> None:
        """Send a message without an answer, from any thread. Raises MailboxFull or ActorStopped."""
        self._mailbox.put(Envelope(message, None))

    async def stop(self, *, timeout_s: float = 10.0) -> None:
        """Finish the current message, then stop; the other messages get ActorStopped."""
        await self._cell.stop(timeout_s)

    def _expire(self, envelope: Envelope, timeout_s: float) -> None:
        envelope.answer(
            DeadlineExceeded(
                f"actor {self.name} gave no answer to {type(envelope.message).__name__} "
                f"within {timeout_s:g} s"
            )
        )


class ActorSystem:
    """All actors of one process: spawns them, supervises them, stops them in reverse order."""

    def __init__(
        self, name: str, *, on_escalate: Callable[[str, BaseException], None] | None = None
    ) -> None:
        self.name = name
        self._on_escalate = on_escalate
        self._cells: dict[str, Cell] = {}

    async def spawn(
        self,
        factory: Callable[[], Actor | ThreadActor],
        *,
        name: str,
        restart: Restart = DEFAULT_RESTART,
    ) -> ActorRef:
        """Start an actor; return after its `started`, or raise the exception of `started`.

        The factory runs on the event loop, all methods of a ThreadActor on its thread.
        """
        if name in self._cells:
            raise FailedPrecondition(f"there is an actor {name} already")
        first = factory()
        cell_type = ThreadCell if isinstance(first, ThreadActor) else LoopCell
        cell = cell_type(name, first, factory, restart, self._escalate)
        self._cells[name] = cell
        cell.task.add_done_callback(lambda _: self._forget(cell))
        try:
            await cell.ready
        except BaseException:
            await cell.stop(timeout_s=1.0)
            raise
        return ActorRef(cell)

    def stalled(self, limit_s: float) -> list[str]:
        """Return the names of actors whose messages have waited for `limit_s`, none handled."""
        return [cell.name for cell in self._cells.values() if cell.mailbox.stalled_s() >= limit_s]

    async def stop(self, *, timeout_s: float = 10.0) -> None:
        """Stop all actors, the youngest first, within `timeout_s` in all."""
        deadline = time.monotonic() + timeout_s
        while self._cells:
            cell = self._cells[next(reversed(self._cells))]
            await cell.stop(max(0.0, deadline - time.monotonic()))
            self._forget(cell)

    def _forget(self, cell: Cell) -> None:
        if self._cells.get(cell.name) is cell:
            del self._cells[cell.name]

    def _escalate(self, name: str, error: BaseException) -> None:
        log.error("actor_escalated", system=self.name, actor=name, exc_info=error)
        if self._on_escalate is not None:
            self._on_escalate(name, error)
