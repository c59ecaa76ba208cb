"""Actors: state that one message at a time may touch.

The life of an actor:

    spawn -> started() -> receive(message), receive(message), ... -> stopped()
    a ForgeError from receive: answers the asker, the actor goes on
    any other exception: answers the asker, stopped(), back-off, a fresh actor from the factory

`Actor` lives on the event loop, `ThreadActor` on a thread of its own (LMDB, torch). Both are
reached through an `ActorRef` alone. Owns what an actor is; its address is
`forge.runtime.actor_system`, its queue `forge.runtime.mailbox`, its restarts
`forge.runtime.supervision`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, ClassVar

from forge.core.errors import ForgeError


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
