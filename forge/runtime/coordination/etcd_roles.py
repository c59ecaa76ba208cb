"""The roles of a cluster in etcd: the keys that each service reads and writes.

Owns the table; a new key of a service needs its prefix here. Not here: `etcd_users` applies it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_SHARED = ("services/", "config/", "tokens")
_EVERYTHING = ("",)


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdRole:
    """Keys relative to /forge/<cluster>/; with a slash at the end, or empty, all that begin so."""

    reads: tuple[str, ...] = _SHARED
    writes: tuple[str, ...] = ()
    """It reads these too."""


ROLES: Mapping[str, EtcdRole] = {
    "pool": EtcdRole(writes=("services/pool/", "leader/pool/", "pool/")),
    "scheduler": EtcdRole(writes=("services/scheduler/", "leader/scheduler", "scheduler/")),
    "gateway": EtcdRole(writes=("services/gateway/",)),
    "inference": EtcdRole(
        reads=(*_SHARED, "weights/"),
        writes=("services/prefill/", "services/decode/", "services/router/"),
    ),
    "trainer": EtcdRole(writes=("services/trainer/", "leader/trainer/", "trainer/", "weights/")),
    "runner": EtcdRole(writes=("services/runner/",)),
    "operator": EtcdRole(reads=_EVERYTHING),
    "admin": EtcdRole(
        reads=_EVERYTHING, writes=("tokens", "config/", "pool/", "scheduler/", "trainer/")
    ),
}
"""By service; "operator" and "admin" are for people. Their names are `etcd_user`s."""


def etcd_user(cluster: str, service: str) -> str:
    """Return the name of a service's user and of its role."""
    return f"{cluster}.{service}"
