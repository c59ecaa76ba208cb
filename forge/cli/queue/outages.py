"""Waits of a command for an unreachable scheduler, pool shard or etcd.

Owns the repetition and the report of an outage; the calls are idempotent.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from forge.client.retry import retried
from forge.core.errors import ForgeError

Result = TypeVar("Result")


class Outages:
    """Repeats calls until they are answered, and reports the begin and the end of each outage."""

    def __init__(self, report: Callable[[str], None], *, longest_s: float) -> None:
        self._report = report
        self._longest_s = longest_s
        self._reported = False

    async def outlast(self, call: Callable[[], Awaitable[Result]]) -> Result:
        """Returns the answer. Raises the last error once an outage is longer than `longest_s`, and
        errors that no repetition mends at once."""

        async def attempt() -> Result:
            try:
                answer = await call()
            except ForgeError as error:
                if error.retryable and not self._reported:
                    self._reported = True
                    self._report(f"scheduler or pool shard unreachable, waiting: {error}")
                raise
            if self._reported:
                self._reported = False
                self._report("reachable again")
            return answer

        return await retried(attempt, retry_for_s=self._longest_s)
