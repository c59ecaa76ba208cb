"""The renewal of a runner's token, by the scheduler, at half of its life.

Owns the moments. `forge.runtime.security.bearer` owns the token and its file. A token that cannot
be renewed stays in use until it expires; an operator replaces its file.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any, Final

from forge.core.clocks import time_text
from forge.core.errors import ForgeError
from forge.runtime.security.bearer import Bearer
from forge.runtime.telemetry import gauge, log
from forge.v1 import scheduler_pb2 as pb

CALL_S: Final = 10.0
CHECK_S: Final = 60.0
"""Interval of checks: an operator may replace the file, and clocks change."""
SHORTEST_S: Final = 1.0
RETRY_S: Final = 10.0
"""Pause after a failed call."""
REFUSED_S: Final = 3600.0
"""Pause after a refusal."""

_EXPIRY = gauge("forge_runner_token_expires_unix_seconds", "Expiry of the runner's token.")


@dataclass(eq=False, slots=True)
class TokenRenewal:
    """Keeps the token of one runner valid."""

    bearer: Bearer
    scheduler: Callable[..., Awaitable[Any]]
    """As `forge.agents.runner.Scheduler`."""
    _: KW_ONLY
    clock: Callable[[], float] = time.time
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep

    async def run(self) -> None:
        """Renews without end; a token without id or expiry never."""
        while True:
            claims = self.bearer.claims
            _EXPIRY.set(claims.expires_unix_s)
            half_s = (claims.expires_unix_s - claims.issued_unix_s) / 2
            left_s = claims.expires_unix_s - half_s - self.clock()
            if claims.token_id and half_s > 0 and left_s <= 0:
                await self.sleep(await self._renew())
            else:
                await self.sleep(min(max(left_s, SHORTEST_S), CHECK_S))

    async def _renew(self) -> float:
        """Returns the pause before the next check."""
        try:
            renewed = await self.scheduler("RenewToken", pb.RenewTokenRequest(), timeout_s=CALL_S)
        except ForgeError as error:
            expires = time_text(self.bearer.claims.expires_unix_s)
            log.warning("token_not_renewed", error=str(error), expires=expires)
            return RETRY_S if error.retryable else REFUSED_S
        try:
            self.bearer.renew(renewed.token)
        except OSError as error:
            log.warning("token_not_stored", path=error.filename, error=error.strerror)
        log.info("token_renewed", expires=time_text(renewed.expires_unix_s))
        return SHORTEST_S
