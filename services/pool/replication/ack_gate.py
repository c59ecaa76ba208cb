"""The acknowledgement gate of a leader: answers wait until enough replicas have what they report.

Owns which answers wait, and for which position. Whether the shard acknowledges alone is for
`leader` to say; by itself a gate stays shut.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from forge.core.errors import DeadlineExceeded, ForgeError, Unavailable
from services.pool.metrics import REPLICA_LAG

RETRY_S = 0.5


class Gate:
    """Answers of a leader pass when enough replicas have what they tell on disk."""

    def __init__(self, shard: str, *, position: int, leads: Callable[[], bool]) -> None:
        self.position = position
        """Of the newest commit here."""
        self._leads = leads
        self._shard = shard
        self._confirmed = 0
        self.required = False
        """Answers wait for the follower."""
        self._shut = "no follower has joined yet"
        """Why nothing is acknowledged; "" when it is."""
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def is_shut(self) -> bool:
        return bool(self._shut)

    def admit(self) -> None:
        """Raises `Unavailable` for a change that could not be acknowledged."""
        if not self._leads():
            raise Unavailable(f"this instance of pool shard {self._shard} leads no more")
        if self._shut:
            raise Unavailable(
                f"pool shard {self._shard} acknowledges nothing: {self._shut}",
                retry_after_s=RETRY_S,
            )

    async def passed(self, *, timeout_s: float) -> None:
        """Returns once everything committed by now may be told.

        Raises `Unavailable` when it may not, `DeadlineExceeded` when that takes too long.
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
        """The follower has everything up to `position` on disk."""
        self._confirmed = max(self._confirmed, position)
        REPLICA_LAG.set(self.position - self._confirmed)
        # In order of position: each was the newest when it came.
        while self._waiting and self._waiting[0][0] <= self._confirmed:
            _settle(self._waiting.popleft()[1], None)

    def require(self, confirmed: int) -> None:
        """From now on answers wait for a follower that has everything up to `confirmed`."""
        self.required, self._confirmed = True, confirmed

    def open(self) -> None:
        """Changes are taken."""
        self._shut = ""

    def go_alone(self) -> None:
        """This replica is the only one in sync: answers wait for nobody."""
        self.required, self._shut = False, ""
        self._release(None)

    def shut(self, why: str) -> None:
        """Nothing is acknowledged, neither what comes nor what waits."""
        self.required, self._shut = False, why
        self._release(
            Unavailable(
                f"pool shard {self._shard} cannot acknowledge what it stored: {why}",
                retry_after_s=RETRY_S,
            )
        )

    def _release(self, error: ForgeError | None) -> None:
        while self._waiting:
            _settle(self._waiting.popleft()[1], error)


def _settle(future: asyncio.Future[None], error: ForgeError | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
