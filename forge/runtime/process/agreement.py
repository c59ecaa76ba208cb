"""The agreement of a starting instance with the living ones.

Each instance has its agreed values in its directory entry. A starting instance compares them before
it loads anything, while it starts or stands by, and once more after its registration. A difference
that stays for two leases ends it: by then the entry of a dead instance has expired. Of two that
register at the same time, the one with the higher id ends.
Not here: the values (`forge.runtime.settings.agreed`).
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from contextlib import suppress

from forge.core.errors import ConfigError, Unavailable
from forge.runtime.coordination import Coordinator, Instance
from forge.runtime.settings import ServiceConfig
from forge.runtime.telemetry import log

AGREED_KEY = "agreed"
"""Metadata key: the agreed values, as a JSON object."""
_LOOK_S = 0.2
"""Pause between two looks at an instance with other values."""


class Agreement:
    """The agreed values of one process, compared with those of its cluster."""

    def __init__(self, coordinator: Coordinator, config: ServiceConfig, *, kind: str) -> None:
        self._coordinator = coordinator
        self._config = config
        self._own = (kind, config.instance_id)
        self._agreed = config.agreed()
        self._patience_s = 2 * config.lease_ttl_s + 1

    @property
    def metadata(self) -> dict[str, str]:
        """The metadata of this instance's directory entry."""
        return {AGREED_KEY: json.dumps(self._agreed)} if self._agreed else {}

    async def check(self, *, registered: bool = False) -> None:
        """Raises `ConfigError`, with both values of a setting, if a living instance still differs
        after a wait; Unavailable."""
        give_up_s = time.monotonic() + self._patience_s
        while differing := await self._differing():
            refusals = [self._refusal(one, names) for one, names in differing]
            if self._config.accept_differing:
                log.warning("settings_differ", error=refusals[0])
                return
            first = min((one.kind, one.instance_id) for one, _ in differing)
            if time.monotonic() >= give_up_s or (registered and first < self._own):
                raise ConfigError(refusals[0])
            await asyncio.sleep(_LOOK_S)

    async def watch(self) -> None:
        """Check until cancelled; raises `ConfigError` as `check` does."""
        while True:
            await asyncio.sleep(self._config.lease_ttl_s)
            with suppress(Unavailable):
                await self.check()

    async def _differing(self) -> list[tuple[Instance, list[str]]]:
        """Instances that differ, each with the names of these values."""
        if not self._agreed:
            return []
        found = []
        for one in await self._coordinator.all_instances():
            # A runner has no key of the cluster and must not stop a service.
            if one.kind == "runner" or (one.kind, one.instance_id) == self._own:
                continue
            theirs = agreed_of(one)
            names = [
                name
                for name, value in self._agreed.items()
                if name in theirs and theirs[name] != value
            ]
            if names:
                found.append((one, names))
        return found

    def _refusal(self, other: Instance, names: list[str]) -> str:
        name, *more = names
        also = f", as must {', '.join(map(_shown, more))}" if more else ""
        return (
            f"{_shown(name)} = {self._agreed[name]} of {' '.join(self._own)} differs from "
            f"{agreed_of(other)[name]} of {other.kind} {other.instance_id}, and must be equal"
            f"{also}: set one value for both, or, to change it while instances run, start each "
            "changed one with --accept-differing"
        )


def agreed_of(instance: Instance) -> Mapping[str, str]:
    """Return the agreed values of an instance; none from an earlier release."""
    return read_agreed(instance.metadata.get(AGREED_KEY, "{}"))


def read_agreed(text: str) -> Mapping[str, str]:
    """Return the agreed values of a metadata entry; none from an unreadable one."""
    with suppress(ValueError):
        agreed = json.loads(text)
        if isinstance(agreed, dict):
            return agreed
    return {}


def _shown(name: str) -> str:
    return name.rpartition("/")[2]
