"""Reads replaced keys and certificates while the process serves.

One rule: a file that changed, and is unchanged for `PERIOD_S`, is read. Valid files replace the
ones before; invalid files are logged once and change nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from forge.core.errors import ConfigError
from forge.runtime.security.credentials import Security
from forge.runtime.telemetry import log

PERIOD_S = 2.0


async def reload_credentials(
    security: Security,
    *,
    on_key: Callable[[], Awaitable[None]] | None = None,
    on_tls: Callable[[], None] | None = None,
) -> None:
    """Check the files every `PERIOD_S`, without end."""
    while True:
        await asyncio.sleep(PERIOD_S)
        if _changed("key_file", security.reload_key) and on_key is not None:
            await on_key()
        if _changed("tls", security.reload_tls) and on_tls is not None:
            on_tls()


def _changed(files: str, reload: Callable[[], bool]) -> bool:
    try:
        changed = reload()
    except ConfigError as error:
        log.warning("credentials_not_reloaded", files=files, error=str(error))
        return False
    if changed:
        log.info("credentials_reloaded", files=files)
    return changed
