"""Delivers messages that an actor of the term must handle: the pool or etcd has the change already.

Owns the repetition. A message whose deadline passes in the mailbox is skipped there, so an actor
that handles it without a wait handles it once.
"""

from __future__ import annotations

import asyncio
from typing import Any

from forge.core.errors import ActorStopped, ForgeError
from forge.runtime.actors.actor_system import ActorRef
from forge.runtime.telemetry import log

ASK_S = 30.0
RETRY_S = 1.0


async def ask_until_handled(actor: ActorRef, message: Any) -> Any:
    """Returns the actor's answer; repeats the message after each retryable error. Raises
    ActorStopped, as the term has then ended, and errors that no retry helps."""
    while True:
        try:
            return await actor.ask(message, timeout_s=ASK_S)
        except ForgeError as error:
            if isinstance(error, ActorStopped) or not error.retryable:
                raise
            log.warning("message_repeated", message=type(message).__name__, error=str(error))
            await asyncio.sleep(error.retry_after_s or RETRY_S)
