"""The instances of a kind: the last known view, and the grace period around an outage.

Pure: events and time go in, instances come out. While etcd is unreachable, leases of live owners
expire, and the owners register again within seconds. An instance that disappears around an outage
is therefore kept for a grace period; at any other time it is removed at once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

GRACE_S = 5.0
"""Longer than an owner takes to register again after an outage."""
SILENCE_S = 1.5
"""Without an answer for this time, etcd counts as unreachable."""


class Signatures(Protocol):
    """Signs and verifies entries, so that no token is sent to a process without a credential."""

    def sign_entry(self, text: str) -> Mapping[str, str]:
        """Return the fields `signer` and `signature`."""

    def verify_entry(self, kind: str, text: str, fields: Mapping[str, Any]) -> None:
        """Raises Unauthenticated for an entry that no process of this kind has signed."""


def entry_text(cluster: str, key: str, lease_id: int, fields: Mapping[str, Any]) -> str:
    """Return the signed text of an entry: its place, its lease and its other fields."""
    signed = {name: one for name, one in fields.items() if name not in ("signer", "signature")}
    return json.dumps([cluster, key, lease_id, signed], sort_keys=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One registered process."""

    kind: str
    instance_id: str
    address: str
    """host:port of its gRPC server."""
    metadata: Mapping[str, str]
    revision: int
    """etcd's mod-revision of this entry: a later one supersedes it."""

    @classmethod
    def decode(cls, kind: str, instance_id: str, value: bytes, revision: int) -> Instance:
        """Read an entry of etcd. Raises ValueError, KeyError or TypeError."""
        fields = json.loads(value)
        return cls(
            kind=kind,
            instance_id=instance_id,
            address=fields["address"],
            metadata=fields["metadata"],
            revision=revision,
        )


class Contact:
    """Time of etcd's last answer; separates an outage of etcd from the death of an instance."""

    def __init__(self, now_s: float) -> None:
        self._heard_s = now_s
        self._recovering_until_s = 0.0

    def heard(self, now_s: float) -> None:
        """Record an answer of etcd."""
        if now_s - self._heard_s > SILENCE_S:
            self._recovering_until_s = now_s + GRACE_S
        self._heard_s = now_s

    def in_doubt(self, now_s: float) -> bool:
        """Whether a lease may expire now although its owner lives."""
        return now_s - self._heard_s > SILENCE_S or now_s < self._recovering_until_s


class Directory:
    """The instances of one kind."""

    def __init__(self) -> None:
        self._present: dict[str, Instance] = {}
        self._missing_until_s: dict[str, float] = {}

    @property
    def instances(self) -> tuple[Instance, ...]:
        """All instances, sorted by id, with those in their grace period."""
        return tuple(instance for _, instance in sorted(self._present.items()))

    def put(self, instance: Instance) -> None:
        """Add an instance, or replace its older revision."""
        known = self._present.get(instance.instance_id)
        self._missing_until_s.pop(instance.instance_id, None)
        if known is None or instance.revision >= known.revision:
            self._present[instance.instance_id] = instance

    def remove(self, instance_id: str, *, now_s: float, in_doubt: bool) -> None:
        """Remove an instance; `in_doubt` keeps it for the grace period."""
        if not in_doubt:
            self._present.pop(instance_id, None)
            self._missing_until_s.pop(instance_id, None)
        elif instance_id in self._present:
            self._missing_until_s.setdefault(instance_id, now_s + GRACE_S)

    def replace(self, found: Mapping[str, Instance], *, now_s: float, in_doubt: bool) -> None:
        """Apply a snapshot; it supersedes all known revisions, even after a loss of etcd's data."""
        for instance_id in self._present.keys() - found.keys():
            self.remove(instance_id, now_s=now_s, in_doubt=in_doubt)
        for instance_id, instance in found.items():
            self._missing_until_s.pop(instance_id, None)
            self._present[instance_id] = instance

    def expire(self, now_s: float) -> float | None:
        """Remove instances whose grace has ended; return the time of the next end, or None."""
        for instance_id, until_s in list(self._missing_until_s.items()):
            if now_s >= until_s:
                del self._missing_until_s[instance_id]
                del self._present[instance_id]
        return min(self._missing_until_s.values(), default=None)
