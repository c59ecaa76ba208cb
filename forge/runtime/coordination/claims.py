"""Leased keys with one owner at a time, taken by compare-and-swap.

    absent                                       take it
    own entry, or of a process that has ended    replace it
    of another live process on this host         Conflict, at once
    of a process on another host                 wait for its lease to end; Conflict if it stays

Every entry names its process. So a fixed instance id is free as soon as its process has ended, also
after kill -9, and a second process cannot take it from a live one.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, asdict, dataclass
from pathlib import Path
from typing import Any

from forge.core.errors import Conflict, Unavailable
from forge.runtime.coordination.directory import Signatures, entry_text
from forge.runtime.coordination.etcd import TIMEOUT_S, Etcd, Versioned
from forge.runtime.coordination.leases import EtcdLease
from forge.runtime.telemetry import log

_LOOK_S = 0.2
"""Pause between two looks at the entry of another host."""
_UNKNOWN_TTL_S = 5.0
"""TTL of entries of an earlier release, which have none."""

Fields = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """The identity of one process for other processes."""

    host: str
    """Boot of the kernel and namespace of process ids; "" where they cannot be read."""
    pid: int
    started: str
    """Clock tick of its start, since pids are reused."""

    @classmethod
    def of(cls, pid: int) -> Owner:
        """Return the identity of process `pid` of this host."""
        return cls(host=_host(), pid=pid, started=_started(pid))

    @property
    def is_here(self) -> bool:
        """Whether it runs on this host, in the same namespace."""
        return bool(self.host) and self.host == _host()

    @property
    def has_ended(self) -> bool:
        """Whether it has certainly ended."""
        return self.is_here and _started(self.pid) not in (self.started, _HIDDEN)


_HIDDEN = "hidden"
"""In place of a start: the process exists, but this user may not read it."""


def _host() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def _started(pid: int) -> str:
    """Return the clock tick; empty when it does not run."""
    try:
        # The program's name, in parentheses, may have any character.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if fields[0] in "ZX" else fields[19]
    except OSError:
        pass
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    except PermissionError:
        pass
    return _HIDDEN


@dataclass(eq=False, slots=True)
class LeasedKey:
    """One leased key, for one owner."""

    etcd: Etcd
    key: str
    _: KW_ONLY
    ttl_s: float
    owner: Owner
    taken: Callable[[Fields], str]
    """Returns the message of `Conflict` from the other entry's fields."""
    signatures: Signatures | None = None

    async def enter(self, fields: Fields) -> EtcdLease:
        """Write the entry under a new lease. Raises `Conflict` when another live process has the
        key, `Unavailable` when etcd does not answer."""
        while True:
            revision = await self._free()
            lease = await EtcdLease.grant(self.etcd, ttl_s=self.ttl_s, timeout_s=TIMEOUT_S)
            try:
                if await self._swap(lease, fields, revision):
                    return lease
            except Unavailable:
                # The lease expired during a pause of this process or of etcd: try again.
                if lease.alive:
                    raise
            except asyncio.CancelledError:
                # The outcome is unknown; revoking the lease deletes the entry.
                await lease.revoke()
                raise
            else:
                await lease.revoke()

    async def write(self, lease: EtcdLease, fields: Fields) -> None:
        """Replace the entry. Raises as `enter` does, and does not wait."""
        found = await self.etcd.get(self.key)
        if found is not None and not self._replaceable(found):
            raise Conflict(self.taken(json.loads(found.value)))
        if not await self._swap(lease, fields, 0 if found is None else found.mod_revision):
            raise Unavailable(f"{self.key} has changed meanwhile: try again")

    async def _swap(self, lease: EtcdLease, fields: Fields, revision: int) -> bool:
        entry: dict[str, Any] = {**fields, "owner": asdict(self.owner), "ttl_s": self.ttl_s}
        if self.signatures is not None:
            text = entry_text(self.etcd.cluster, self.key, lease.lease_id, entry)
            entry |= self.signatures.sign_entry(text)
        swapped = await self.etcd.swap(
            self.key,
            json.dumps(entry).encode(),
            expected_revision=revision,
            lease_id=lease.lease_id,
        )
        return swapped is not None

    async def _free(self) -> int:
        """Wait until the entry may be replaced; return its revision."""
        give_up_s: float | None = None
        while True:
            found = await self.etcd.get(self.key)
            if found is None:
                return 0
            if self._replaceable(found):
                return found.mod_revision
            fields = json.loads(found.value)
            now_s = time.monotonic()
            if give_up_s is None:
                # Twice, as etcd extends leases when another member leads it.
                give_up_s = now_s + 2 * fields.get("ttl_s", _UNKNOWN_TTL_S) + 1
                log.info("waiting_for_holder", key=self.key)
            owner = _owner(fields)
            if now_s >= give_up_s or (owner is not None and owner.is_here):
                raise Conflict(self.taken(fields))
            await asyncio.sleep(_LOOK_S)

    def _replaceable(self, found: Versioned) -> bool:
        owner = _owner(json.loads(found.value))
        return owner is not None and (owner == self.owner or owner.has_ended)


def this_process() -> Owner:
    """Return the owner for claims of this process."""
    return Owner.of(os.getpid())


def _owner(fields: Fields) -> Owner | None:
    """None for an entry of an earlier release."""
    owner = fields.get("owner")
    return None if owner is None else Owner(**owner)
