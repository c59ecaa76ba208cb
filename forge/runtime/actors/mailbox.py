"""The bounded queue of an actor, and its metrics.

Passes messages between threads; every ask gets exactly one answer. Not here: the handling of
messages (`forge.runtime.actors.supervision`).
"""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

from forge.core.errors import ActorStopped, MailboxFull
from forge.runtime.concurrency.futures import settle
from forge.runtime.telemetry import counter, gauge

_HANDLED = counter("forge_actor_messages_total", "Messages handled, by kind of actor.", ["actor"])
_FAILURES = counter("forge_actor_failures_total", "Crashes, by kind of actor.", ["actor"])
_REFUSED = counter("forge_actor_refused_total", "Messages that a full mailbox refused.", ["actor"])
_DEPTH = gauge("forge_actor_mailbox_depth", "Messages waiting, by kind of actor.", ["actor"])


class KindMetrics:
    """Metrics of all actors of one class."""

    def __init__(self, kind: str) -> None:
        self.handled = _HANDLED.labels(kind)
        self.failures = _FAILURES.labels(kind)
        self.refused = _REFUSED.labels(kind)
        self.mailboxes: weakref.WeakSet[Mailbox] = weakref.WeakSet()
        # Counted when scraped, so that a message costs nothing here.
        _DEPTH.labels(kind).set_function(lambda: sum(map(len, tuple(self.mailboxes))))

    @classmethod
    @cache
    def of(cls, kind: str) -> KindMetrics:
        """Return the metrics of a kind of actor."""
        return cls(kind)


class Envelope:
    """A message, and the future of its answer; None for a `tell`."""

    __slots__ = ("message", "reply")

    def __init__(self, message: Any, reply: asyncio.Future[Any] | None) -> None:
        self.message = message
        self.reply = reply

    @property
    def wanted(self) -> bool:
        """False once the asker has given up; the actor then skips the message."""
        return self.reply is None or not self.reply.done()

    def answer(self, outcome: Any) -> None:
        """Answer the ask; an exception is raised there. Call it on the asker's loop only."""
        settle(self.reply, outcome)


def answer_all(envelopes: Iterable[Envelope], outcomes: Iterable[Any]) -> None:
    """Answer each envelope with its outcome."""
    for envelope, outcome in zip(envelopes, outcomes, strict=True):
        envelope.answer(outcome)


class Mailbox:
    """Bounded FIFO queue for any thread."""

    def __init__(
        self, owner: str, metrics: KindMetrics, *, size: int, wake: Callable[[], None]
    ) -> None:
        self._owner = owner
        self._metrics = metrics
        self._size = size
        self._wake = wake
        self._waiting: deque[Envelope] = deque()
        self._lock = threading.Lock()
        self._moved_s = 0.0
        """Time at which a message was last taken, or came into an empty queue."""
        self.closed = False
        metrics.mailboxes.add(self)

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, envelope: Envelope) -> None:
        """Raises MailboxFull or ActorStopped; never waits."""
        with self._lock:
            if self.closed:
                raise ActorStopped(f"actor {self._owner} has stopped")
            if len(self._waiting) >= self._size:
                self._metrics.refused.inc()
                raise MailboxFull(
                    f"actor {self._owner} has {self._size} messages waiting", retry_after_s=0.1
                )
            if not self._waiting:
                self._moved_s = time.monotonic()
            self._waiting.append(envelope)
        self._wake()

    def stalled_s(self) -> float:
        """Return the time for which messages have waited and none was taken; 0 when empty."""
        return time.monotonic() - self._moved_s if self._waiting else 0.0

    def take_envelopes(self, limit: int = 1) -> list[Envelope]:
        """Return up to `limit` wanted messages; none when empty or closed."""
        taken: list[Envelope] = []
        with self._lock:
            self._moved_s = time.monotonic()
            while self._waiting and len(taken) < limit:
                envelope = self._waiting.popleft()
                if envelope.wanted:
                    taken.append(envelope)
        return taken

    def close(self) -> list[Envelope]:
        """Refuse further messages; return the messages left, for the caller to answer."""
        with self._lock:
            self.closed = True
            left = list(self._waiting)
            self._waiting.clear()
        self._wake()
        return left
