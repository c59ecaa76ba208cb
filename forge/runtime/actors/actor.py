"""Actors: each owns state and handles one message at a time.

The life of an actor:

    spawn -> started() -> receive(message), receive(message), ... -> stopped()
    a ForgeError from receive: answers the asker, the actor stays
    any other exception: answers the asker, stopped(), back-off, a fresh actor from the factory

`Actor` runs on the event loop, `ThreadActor` on a thread of its own (LMDB, torch). Only an
`ActorRef` reaches them. Not here: addresses (`forge.runtime.actors.actor_system`), queues
(`forge.runtime.actors.mailbox`), restarts (`forge.runtime.actors.supervision`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, ClassVar

from forge.core.errors import ForgeError


class Actor:
    """Base class; `receive` is a `match` over frozen dataclasses."""

    mailbox_size: ClassVar[int] = 1024

    async def started(self) -> None:
        """Called before the first message; `spawn` raises its exception."""

    async def receive(self, message: Any) -> Any:
        """Handle one message; the return value answers an ask."""
        # No case of the subclass takes the message: fail the ask.
        raise NotImplementedError(f"{type(self).__name__} handles no {type(message).__name__}")

    async def stopped(self) -> None:
        """Called after the last message, or after a crash, if `started` had returned."""


class ThreadActor:
    """An actor whose work blocks: every method runs on its own thread."""

    mailbox_size: ClassVar[int] = 1024
    batch_size: ClassVar[int] = 1
    """Most messages that `receive_batch` gets at once."""
    batch_wait_s: ClassVar[float] = 0.0
    """Longest wait of a batch's first message for more messages; a full batch does not wait."""
    loop: asyncio.AbstractEventLoop
    """The system's event loop; reach it by `call_soon_threadsafe`."""

    def started(self) -> None:
        """Called before the first message; `spawn` raises its exception."""

    def receive(self, message: Any) -> Any:
        """Handle one message; the return value answers an ask."""
        # No case of the subclass takes the message: fail the ask.
        raise NotImplementedError(f"{type(self).__name__} handles no {type(message).__name__}")

    def receive_batch(self, messages: Sequence[Any]) -> Sequence[Any]:
        """Return one outcome per message; an Exception as outcome fails that ask alone."""
        return [self._outcome(message) for message in messages]

    def weigh(self, message: Any) -> int:
        """Weight of a message; a batch of weight `batch_size` is complete."""
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
