"""Actors: state that one message at a time may touch.

The life of an actor:

    spawn -> started() -> receive(message), receive(message), ... -> stopped()
    a ForgeError from receive: answers the asker, the actor goes on
    any other exception: answers the asker, stopped(), back-off, a fresh actor from the factory

`Actor` lives on the event loop, `ThreadActor` on a thread of its own (LMDB, torch). Both are
reached through an `ActorRef` alone. Owns what an actor is and how it is addressed; its queue is
`forge.runtime.mailbox`, its restarts are `forge.runtime.supervision`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from forge.core.errors import DeadlineExceeded, FailedPrecondition, ForgeError
from forge.runtime.mailbox import Envelope
from forge.runtime.supervision import DEFAULT_RESTART, Cell, LoopCell, Restart, ThreadCell
from forge.runtime.telemetry import log

__all__ = ["Actor", "ActorRef", "ActorSystem", "Restart", "ThreadActor"]


class Actor:
    """Subclass it; override `receive` with a `match` over frozen dataclasses."""

    mailbox_size: ClassVar[int] = 1024

    async def started(self) -> None:
        """Called before the first message; what it raises goes to who spawns."""

    async def receive(self, message: Any) -> Any:
        """Handle one message; the return value answers an ask."""
        # Reached by a message that no case of the subclass takes: an answer, not a gap.
        raise NotImplementedError(f"{type(self).__name__} handles no {type(message).__name__}")

    async def stopped(self) -> None:
        """Called after the last message, or after a crash, if `started` had returned."""


class ThreadActor:
    """An actor whose work blocks: every method runs on its own thread."""

    mailbox_size: ClassVar[int] = 1024
    batch_size: ClassVar[int] = 1
    """Most messages that `receive_batch` gets at once."""
    batch_wait_s: ClassVar[float] = 0.0
    """How long the first message of a batch waits for more, unless they weigh enough already."""
    loop: asyncio.AbstractEventLoop
    """The system's event loop; `call_soon_threadsafe` is the way back to it."""

    def started(self) -> None:
        """Called before the first message; what it raises goes to who spawns."""

    def receive(self, message: Any) -> Any:
        """Handle one message; the return value answers an ask."""
        # Reached by a message that no case of the subclass takes: an answer, not a gap.
        raise NotImplementedError(f"{type(self).__name__} handles no {type(message).__name__}")

    def receive_batch(self, messages: Sequence[Any]) -> Sequence[Any]:
        """One outcome per message; an Exception as outcome fails that ask alone."""
        return [self._outcome(message) for message in messages]

    def weigh(self, message: Any) -> int:
        """For how many messages of a batch this one counts: at `batch_size` none is waited for."""
        return 1

    def work(self) -> bool:
        """Called when no message waits. True: call again soon; False: sleep until mail comes."""
        return False

    def stopped(self) -> None:
        """Called after the last message, or after a crash, if `started` had returned."""

    def _outcome(self, message: Any) -> Any:
        try:
            return self.receive(message)
        except ForgeError as error:
            return error


class ActorRef:
    """The address of an actor: all that anybody else ever holds of it."""

    __slots__ = ("_cell", "_mailbox", "name")

    def __init__(self, cell: Cell) -> None:
        self.name = cell.name
        self._cell = cell
        self._mailbox = cell.mailbox

    @property
    def alive(self) -> bool:
        return not self._mailbox.closed

    async def ask(self, message: Any, *, timeout_s: float) -> Any:
        """The actor's answer. Raises MailboxFull, ActorStopped, DeadlineExceeded (the outcome is
        then unknown), or what `receive` raised."""
        loop = asyncio.get_running_loop()
        reply: asyncio.Future[Any] = loop.create_future()
        envelope = Envelope(message, reply)
        self._mailbox.put(envelope)
        deadline = loop.call_later(timeout_s, self._expire, envelope, timeout_s)
        try:
            return await reply
        finally:
            deadline.cancel()

    def tell(self, message: Any) -> None:
        """Leave a message, from any thread. Raises MailboxFull or ActorStopped."""
        self._mailbox.put(Envelope(message, None))

    async def stop(self, *, timeout_s: float = 10.0) -> None:
        """Let the message in hand finish, handle nothing more, answer the rest ActorStopped."""
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
        """Start an actor and return once `started` has; what `started` raises is raised here.

        The factory runs on the event loop; all of a ThreadActor's methods on its thread.
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

    async def stop(self, *, timeout_s: float = 10.0) -> None:
        """Stop every actor, the youngest first; `timeout_s` is for all of them together."""
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
