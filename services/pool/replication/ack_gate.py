"""The acknowledgement gate of a leader: answers wait until enough replicas have the writes they
report.

Owns the waiting answers and their positions. `leader` opens and shuts the gate.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from forge.core.errors import DeadlineExceeded, ForgeError, Unavailable
from forge.runtime.concurrency.futures import settle
from services.pool.metrics import REPLICA_LAG

RETRY_S = 0.5


class AckGate:
    """Answers of a leader pass once enough replicas have their writes on disk."""

    def __init__(self, shard: str, *, position: int, leads: Callable[[], bool]) -> None:
        self.position = position
        """Newest commit of the leader."""
        self._leads = leads
        self._shard = shard
        self._confirmed = 0
        self.required = False
        """Answers wait for the follower."""
        self._shut = "no follower has joined yet"
        """Reason why no write is acknowledged; "" if writes are."""
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def is_shut(self) -> bool:
        """True while no change is acknowledged."""
        return bool(self._shut)

    @property
    def refusal(self) -> str:
        """Reason why no change is acknowledged; "" if changes are."""
        return self._shut

    def admit(self) -> None:
        """Raises `Unavailable` for a change that cannot be acknowledged."""
        if not self._leads():
            raise Unavailable(f"this instance is no longer the leader of pool shard {self._shard}")
        if self._shut:
            raise Unavailable(
                f"pool shard {self._shard} is not accepting writes: {self._shut}",
                retry_after_s=RETRY_S,
            )

    async def passed(self, *, timeout_s: float) -> None:
        """Returns once every commit so far may be reported.

        Raises `Unavailable` if it may not, `DeadlineExceeded` after `timeout_s`.
        """
        position = self.position
        if not self.required:
            self.admit()
            return
        if self._confirmed >= position:
            return
        confirmed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((position, confirmed))
        try:
            async with asyncio.timeout(timeout_s):
                await confirmed
        except TimeoutError:
            raise DeadlineExceeded(
                f"the follower of pool shard {self._shard} did not confirm in time"
            ) from None

    def confirm(self, position: int) -> None:
        """Note that the follower has everything up to `position` on disk."""
        self._confirmed = max(self._confirmed, position)
        REPLICA_LAG.set(self.position - self._confirmed)
        # In order of position: each was the newest when it came.
        while self._waiting and self._waiting[0][0] <= self._confirmed:
            settle(self._waiting.popleft()[1], None)

    def require(self, confirmed: int) -> None:
        """From now on answers wait for the follower, which has everything up to `confirmed`."""
        self.required, self._confirmed = True, confirmed

    def open(self) -> None:
        """Changes are accepted."""
        self._shut = ""

    def go_alone(self) -> None:
        """This replica is the only one in sync: answers do not wait."""
        self.required, self._shut = False, ""
        self._release(None)

    def shut(self, why: str) -> None:
        """Refuses new changes, and the answers that wait."""
        self.required, self._shut = False, why
        self._release(
            Unavailable(
                f"pool shard {self._shard} cannot acknowledge a stored write: {why}",
                retry_after_s=RETRY_S,
            )
        )

    def _release(self, error: ForgeError | None) -> None:
        while self._waiting:
            settle(self._waiting.popleft()[1], error)
