"""Which instances of a kind there are: the last known view, and who may be missing from it.

Pure: events and time come in, instances go out. When etcd itself was out of reach, leases run out
although their owners live, and return within seconds; an instance that vanishes around an outage
is therefore kept for a grace period. One that vanishes while all is well is gone at once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

GRACE_S = 5.0
"""Longer than any owner takes to register again once etcd answers."""
SILENCE_S = 1.5
"""Without an answer for this long, etcd counts as out of reach."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One process that offers something."""

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
    """When etcd last answered; tells an outage of etcd from the death of an instance."""

    def __init__(self, now_s: float) -> None:
        self._heard_s = now_s
        self._recovering_until_s = 0.0

    def heard(self, now_s: float) -> None:
        """Record an answer of etcd."""
        if now_s - self._heard_s > SILENCE_S:
            self._recovering_until_s = now_s + GRACE_S
        self._heard_s = now_s

    def in_doubt(self, now_s: float) -> bool:
        """Whether a lease that ran out just now may have run out through no fault of its owner."""
        return now_s - self._heard_s > SILENCE_S or now_s < self._recovering_until_s


class Directory:
    """The instances of one kind."""

    def __init__(self) -> None:
        self._present: dict[str, Instance] = {}
        self._missing_until_s: dict[str, float] = {}

    @property
    def instances(self) -> tuple[Instance, ...]:
        """Sorted by id, those on grace included."""
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
        """Take over a snapshot: it supersedes every revision seen, even that of a lost etcd."""
        for instance_id in self._present.keys() - found.keys():
            self.remove(instance_id, now_s=now_s, in_doubt=in_doubt)
        for instance_id, instance in found.items():
            self._missing_until_s.pop(instance_id, None)
            self._present[instance_id] = instance

    def expire(self, now_s: float) -> float | None:
        """Drop those whose grace has ended; when to call again, None: nobody is on grace."""
        for instance_id, until_s in list(self._missing_until_s.items()):
            if now_s >= until_s:
                del self._missing_until_s[instance_id]
                del self._present[instance_id]
        return min(self._missing_until_s.values(), default=None)
