"""Scaffolds by name, each created for the first task that needs it.

Owns the registry. An entry is "module:factory", so a runner imports only the scaffolds of its
tasks. Packages add scaffolds through the entry point group `forge.scaffolds`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from types import MappingProxyType

from forge.agents.plugins import load_attribute
from forge.agents.rollout import CheckedScaffold, Scaffold
from forge.core.entry_points import installed
from forge.core.errors import ConfigError, NotFound, Unavailable
from forge.runtime.telemetry import log

ENTRY_POINTS = "forge.scaffolds"
SCAFFOLDS: Mapping[str, str] = {
    "blackbox": "forge.agents.scaffolds.blackbox:BlackBox",
    "whitebox": "forge.agents.scaffolds.whitebox:WhiteBox",
}


class Scaffolds:
    """One instance of each used scaffold.

    A factory gets `timeout_s`, the deadline of one model call, and `tls_ca`, the PEM file that
    verifies gateways, "" for plain HTTP.
    """

    def __init__(
        self,
        *,
        timeout_s: float,
        tls_ca: str = "",
        extra: Mapping[str, str] = MappingProxyType({}),
        override: CheckedScaffold | None = None,
    ) -> None:
        """`extra` adds "module:factory" entries; `override` runs every task instead."""
        added = {name: entry.value for name, entry in installed(ENTRY_POINTS).items()}
        self._known = {**SCAFFOLDS, **added, **extra}
        self._options = {"timeout_s": timeout_s, "tls_ca": tls_ca}
        self._override = override
        self._made: dict[str, Scaffold] = {}
        self._broken: dict[str, str] = {}
        """Errors of the scaffolds that could not be imported; no more of their tasks are leased."""

    @property
    def names(self) -> frozenset[str]:
        """Every scaffold that `get` returns; empty: any. Raises `Unavailable` if none of them can
        be imported here."""
        if self._override is not None:
            return frozenset()
        if not (usable := self._known.keys() - self._broken.keys()):
            raise Unavailable(f"no scaffold can be imported: {'; '.join(self._broken.values())}")
        return frozenset(usable)

    async def get(self, name: str) -> Scaffold:
        """Returns the scaffold with this name. Raises `NotFound` with the known names, and
        `Unavailable` if this host cannot import it: another one may, so the task is not at fault.

        Imports it on a thread: the import of an SDK takes seconds on a loaded host.
        """
        if self._override is not None:
            return self._override
        if name not in self._made:
            if name not in self._known:
                known = ", ".join(sorted(self._known))
                raise NotFound(f"unknown scaffold {name!r}; this runner knows {known}")
            factory = await self._imported(name)
            # Another rollout may have waited for the same import.
            if name not in self._made:
                self._made[name] = factory(**self._options)
        return self._made[name]

    async def _imported(self, name: str) -> Callable[..., Scaffold]:
        try:
            factory: Callable[..., Scaffold] = await asyncio.to_thread(
                load_attribute, self._known[name]
            )
        except ConfigError as error:
            if name not in self._broken:
                log.error("scaffold_unusable", scaffold=name, error=str(error))
            self._broken[name] = str(error)
            raise Unavailable(f"this runner's host cannot run {name!r}: {error}") from error
        self._broken.pop(name, None)
        return factory

    async def check(self) -> None:
        """Raises `ConfigError` if this host cannot run the scaffold of every task."""
        if self._override is not None:
            await self._override.check()

    async def close(self) -> None:
        """Closes all created scaffolds."""
        for scaffold in (*self._made.values(), *((self._override,) if self._override else ())):
            await scaffold.close()
