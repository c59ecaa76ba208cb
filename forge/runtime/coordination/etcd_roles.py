"""The roles of a cluster in etcd: the keys that each service reads and writes.

Owns the table; a new key of a service needs its prefix here. Not here: `etcd_users` applies it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from forge.core.errors import ConfigError
from forge.runtime.serving_groups import MARK

ROOT = "root"
"""etcd's own name for the user and the role with every permission."""
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_-]{0,62})")
_SHARED = ("services/", "config/", "tokens")
_EVERYTHING = ("",)


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdRole:
    """Keys relative to /forge/<cluster>/; with a slash or an asterisk at the end, or empty, all
    that begin so."""

    reads: tuple[str, ...] = _SHARED
    writes: tuple[str, ...] = ()
    """Keys that the role writes and reads."""


ROLES: Mapping[str, EtcdRole] = {
    "pool": EtcdRole(writes=("services/pool/", "leader/pool/", "pool/")),
    "scheduler": EtcdRole(
        writes=("services/scheduler/", "leader/scheduler", "scheduler/", "pool/shards/")
    ),
    "gateway": EtcdRole(reads=(*_SHARED, "pool/shards/"), writes=("services/gateway/",)),
    "inference": EtcdRole(
        reads=(*_SHARED, "weights/"),
        writes=tuple(
            f"services/{kind}{end}"
            for kind in ("prefill", "decode", "router")
            # Of the policy, and of each serving group.
            for end in ("/", f"{MARK}*")
        ),
    ),
    "trainer": EtcdRole(writes=("services/trainer/", "leader/trainer/", "trainer/", "weights/")),
    "console": EtcdRole(writes=("services/console/",)),
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


def runner_service(host: str) -> str:
    """Return the service name of the runners on one host, for their user. Raises ConfigError."""
    if not _HOST.fullmatch(host):
        raise ConfigError(f"runner host {host!r} must be a host name without a dot")
    return f"runner@{host}"


def runner_role(host: str) -> EtcdRole:
    """Return the role of the runners on one host: their own entries, by instance id."""
    names = ("agents", "runner")
    return EtcdRole(writes=tuple(f"services/runner/{name}-{host}-*" for name in names))


def is_user_name(name: str) -> bool:
    """Return whether a name may be a user of some cluster: etcd accepts a certificate with such a
    common name without a password."""
    cluster, _, service = name.rpartition(".")
    return name == ROOT or bool(cluster and service.partition("@")[0] in ROLES)
