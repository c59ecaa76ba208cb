"""`forge doctor --etcd` or `--run-dir`: etcd, the clocks and the pool of a running system."""

from __future__ import annotations

from collections.abc import Iterator

from packaging.version import InvalidVersion, Version

from forge.cli.clocks import compare_clocks
from forge.cli.connection import Connection
from forge.cli.finding import Finding
from forge.client.stored.pool import refusals
from forge.core.clocks import AGREE_S
from forge.core.errors import ForgeError
from forge.runtime.coordination import Coordinator, EtcdStatus
from forge.runtime.process.clock_watch import REMEDY
from forge.runtime.rpc import Channels
from forge.runtime.security.tls import is_loopback_etcd


async def cluster_findings(cluster: Connection) -> list[Finding]:
    """Returns the findings about etcd, the clocks and shards that refuse changes; one if the system
    cannot be reached."""
    try:
        async with cluster.open() as (coordinator, channels):
            etcd = _access(cluster.etcd, demands_login=await coordinator.demands_login())
            member = _member(cluster.etcd, await coordinator.etcd_status())
            clocks = await _clocks(coordinator, channels)
            return [etcd, *member, *clocks, *await _refusals(coordinator)]
    except ForgeError as error:
        remedy = "Start etcd, or correct its address, the key or token, and the certificates."
        return [Finding(ok=False, text=f"cluster {cluster.cluster}: {error}", remedy=remedy)]


def _access(endpoints: str, *, demands_login: bool) -> Finding:
    """A writer of etcd names the addresses that get tokens, so beyond loopback it is protected."""
    encrypted = "https://" in endpoints
    text = (
        f"etcd at {endpoints}: {'TLS' if encrypted else 'plaintext'}, "
        f"{'' if demands_login else 'no '}authentication"
    )
    return Finding(
        ok=is_loopback_etcd(endpoints) or (encrypted and demands_login),
        text=text,
        remedy="Enable both: certificates by `forge certs`, users and roles by `forge etcd apply`.",
    )


def _member(endpoints: str, status: EtcdStatus) -> Iterator[Finding]:
    for problem in status.problems:
        space = "NOSPACE" in problem
        yield Finding(
            ok=False,
            text=f"etcd at {endpoints}: {problem}",
            remedy="It refuses writes: etcdctl compact, etcdctl defrag, then etcdctl alarm disarm."
            if space
            else "Look at the members: etcdctl endpoint status --cluster, and etcd's log.",
        )
    yield Finding(
        ok=is_loopback_etcd(endpoints) or _is_recent(status.version),
        text=f"etcd {status.version}, {status.size_bytes / (1 << 20):.1f} MiB",
        remedy="It may lose data after a crash: upgrade to 3.5.6 or newer, or 3.4.22.",
    )


def _is_recent(version: str) -> bool:
    try:
        known = Version(version)
    except InvalidVersion:
        return True
    return known >= Version("3.5.6") or Version("3.4.22") <= known < Version("3.5")


async def _clocks(coordinator: Coordinator, channels: Channels) -> list[Finding]:
    """Returns one finding for each wrong clock, or one for all clocks."""
    services, clocks = await compare_clocks(coordinator, channels)
    if not clocks.off:
        agree = f"clocks of this machine and {services} services agree within {AGREE_S:g} s"
        return [Finding(ok=True, text=agree)]
    remedy = f"On the host of that address, {REMEDY}."
    return [Finding(ok=False, text=line, remedy=remedy) for line in clocks.lines()]


async def _refusals(coordinator: Coordinator) -> list[Finding]:
    return [
        Finding(ok=False, text=text, remedy=remedy)
        for one in await coordinator.all_instances()
        for text, remedy in refusals(one.metadata)
    ]
