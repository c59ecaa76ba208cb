"""Sends pieces and errors of a decode actor to the callers of its requests, on the event loop.

Pieces and errors of a step wait until its end: one call wakes the loop for all of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from forge.core.errors import ForgeError, ResourceExhausted
from services.inference.engines.base import Piece, Prompt
from services.inference.engines.embedded.messages import Deliver
from services.inference.engines.embedded.sequences import DecodeSequence

_REREAD_AFTER_S = 0.01
"""Pause of the router before it places a request that was sent back."""


def sent_back(prompt: Prompt, reason: str) -> ResourceExhausted:
    """Return the error of a request that is to be read again, with its tokens so far."""
    return ResourceExhausted(
        f"request {prompt.request_id} is read again {reason}", retry_after_s=_REREAD_AFTER_S
    )


class Outbox:
    """Answers in the order of their making."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Deliver, Piece | ForgeError]] = []

    def add(self, sequence: DecodeSequence, piece: Piece) -> None:
        """Send a piece."""
        self._waiting.append((sequence.deliver, piece))

    def fail(self, sequence: DecodeSequence, error: ForgeError) -> None:
        """Send the unsent tokens, then an error."""
        if sequence.unsent:
            self.add(sequence, Piece(tokens=sequence.take_unsent()))
        self._waiting.append((sequence.deliver, error))

    def refuse(self, sequence: DecodeSequence, reason: str) -> None:
        """Fail with ResourceExhausted."""
        request = sequence.prompt.request_id
        self.fail(sequence, ResourceExhausted(f"request {request} {reason}", retry_after_s=0.5))

    def read_again(self, sequence: DecodeSequence, reason: str) -> None:
        """Fail with `sent_back`."""
        self.fail(sequence, sent_back(sequence.prompt, reason))

    def deliver(self, loop: asyncio.AbstractEventLoop) -> None:
        """Send all."""
        if self._waiting:
            loop.call_soon_threadsafe(_deliver_all, self._waiting)
            self._waiting = []


def _deliver_all(waiting: Sequence[tuple[Deliver, Piece | ForgeError]]) -> None:
    for deliver, answer in waiting:
        deliver(answer)
