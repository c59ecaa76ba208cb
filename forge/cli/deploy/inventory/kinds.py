"""Services of a host of an inventory: units, settings, ports and the order of a roll."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

MOST_INSTANCES = 9
"""Most instances of a kind on one host: ports end with the number of the instance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of process."""

    unit: str
    """Name of the template unit, without `@` and ending."""
    service: str = ""
    """Name of the settings file; empty: it has none."""
    etcd_user: str = ""
    """Name of its password in etcd; default: `service`."""
    ports: tuple[int, int] | None = None
    """Ports of gRPC and /metrics, without the instance's digit; None: free ones."""
    http_port: int = 0
    """Default of `http.port`; 0: no HTTP."""
    role: str = ""
    """FORGE_ROLE, of inference."""
    uses_gpu: bool = False
    reads_model: bool = False
    credential: str = "key"
    """File below /etc/forge that its unit reads: the cluster's key, or a token; empty: none."""
    drains: bool = False
    """Whether an upgrade drains it before its stop."""
    is_named: bool = False
    """Whether an inventory names its instances, instead of their number."""
    is_timer: bool = False
    """Whether its unit is a timer, which starts the process."""
    is_optional: bool = False
    """Whether a cluster trains without it."""
    in_discovery: bool = True

    @property
    def has_key(self) -> bool:
        """Whether its unit reads the cluster's key."""
        return self.credential == "key"

    @property
    def password(self) -> str:
        """The name of its password in etcd; empty: it does not use etcd."""
        return self.etcd_user or self.service


KINDS: Mapping[str, Kind] = {
    "pool": Kind(unit="forge-pool", service="pool", ports=(721, 921)),
    "pool-replica": Kind(unit="forge-pool-replica", service="pool", is_named=True),
    "scheduler": Kind(unit="forge-scheduler", service="scheduler", ports=(722, 922)),
    **{
        role: Kind(
            unit="forge-inference",
            service="inference",
            role=role,
            uses_gpu=True,
            reads_model=True,
            drains=True,
        )
        for role in ("prefill", "decode", "both")
    },
    "router": Kind(unit="forge-inference", service="inference", role="router", reads_model=True),
    "trainer": Kind(
        unit="forge-trainer", service="trainer", ports=(725, 925), uses_gpu=True, reads_model=True
    ),
    # Its instance is the number of the host among those of the trainer; 0 has rank 0, which serves.
    "trainer-rank": Kind(
        unit="forge-trainer-rank",
        service="trainer",
        ports=(725, 925),
        uses_gpu=True,
        reads_model=True,
        is_optional=True,
    ),
    "gateway": Kind(
        unit="forge-gateway",
        service="gateway",
        ports=(723, 923),
        http_port=8000,
        reads_model=True,
    ),
    "agents": Kind(
        unit="forge-agents",
        service="agents",
        ports=(726, 926),
        credential="agents-token",
        drains=True,
    ),
    "feed": Kind(
        unit="forge-feed",
        etcd_user="operator",
        credential="feed-token",
        is_named=True,
        is_optional=True,
        in_discovery=False,
    ),
    "console": Kind(
        unit="forge-console",
        service="console",
        ports=(727, 927),
        http_port=7800,
        reads_model=True,
        is_optional=True,
    ),
    "pool-backup": Kind(
        unit="forge-pool-backup",
        credential="",
        is_named=True,
        is_timer=True,
        is_optional=True,
        in_discovery=False,
    ),
}
"""By name in an inventory, in the order of a roll: what serves others comes first."""

ETCD, BACKUP, RANKS = "etcd", "pool-backup", "trainer-rank"
"""Not counted in an inventory: etcd has one member a host, `backup` gives each shard a timer, and
the ranks of a host are one unit."""
RANK_PORT = 7250
"""Port of rank 0 in its unit. With `publish_from = "ranks"` rank N of a host serves N ports
further."""
MEETING_PORT = 29400
"""At which the ranks of a fixed number of hosts meet, on the host with rank 0."""
MAY_END = "forge-feed@"
"""Start of the names of units that end by themselves: a feed, after its last epoch. Its exit code
is then 0, as that of other services is after a stop; that of a stopped feed is not."""
SERVICES = tuple(dict.fromkeys(kind.service for kind in KINDS.values() if kind.service))


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Instance:
    """One process of a host."""

    kind: str
    name: str
    """Instance of the unit, such as `1`, `decode-1`, or the name of a replicated shard."""

    @property
    def unit(self) -> str:
        """The name of its unit."""
        kind = KINDS[self.kind]
        return f"{kind.unit}@{self.name}.{'timer' if kind.is_timer else 'service'}"

    @property
    def env_file(self) -> str:
        """The name of the file with its variables."""
        return f"{KINDS[self.kind].unit.removeprefix('forge-')}@{self.name}.env"

    @property
    def number(self) -> int:
        """The instance's number among those of its kind on the host; 1 for a named one."""
        digits = self.name.rpartition("-")[2]
        return int(digits) if digits.isdigit() and not KINDS[self.kind].is_named else 1

    @property
    def serves(self) -> bool:
        """Whether it serves calls: of a trainer's ranks, the host with rank 0 alone."""
        return self.kind != RANKS or self.number == 0

    @property
    def ports(self) -> dict[str, int]:
        """Fixed ports of the instance, by purpose."""
        if not self.serves:
            return {}
        ports = zip(("grpc", "metrics"), KINDS[self.kind].ports or (), strict=False)
        found = {purpose: port * 10 + self.number for purpose, port in ports}
        return found | ({"meeting": MEETING_PORT} if self.kind == RANKS else {})

    def instance_id(self, host: str) -> str:
        """The instance's id in discovery, as its unit sets it; empty for a process that is not
        there."""
        kind = KINDS[self.kind]
        in_discovery = kind.in_discovery and self.serves
        return f"{kind.unit.split('-')[1]}-{host}-{self.name}" * in_discovery


def has_data(unit: str) -> bool:
    """Return whether a stop of a unit takes data out of the cluster, or a vote out of etcd."""
    return unit.startswith(("forge-pool@", "forge-pool-replica@", "forge-etcd."))


def instances_of(kind: str, count: int) -> list[Instance]:
    """Return numbered instances of a kind."""
    prefix = f"{kind}-" if KINDS[kind].role else ""
    return [Instance(kind=kind, name=f"{prefix}{number}") for number in range(1, count + 1)]


def env_name(instance: Instance) -> str:
    """Return the name of an instance in `env`: `gateway-1`, `pool-replica-s0`, `trainer-rank`."""
    if instance.kind == RANKS:
        return RANKS
    prefix = f"{instance.kind}-"
    return prefix + instance.name.removeprefix(prefix)


def backup_of(shard: Instance) -> Instance:
    """Return the timer that backs a shard up; its instance is the shard's directory."""
    directory = f"{KINDS[shard.kind].unit.removeprefix('forge-')}-{shard.name}"
    return Instance(kind=BACKUP, name=directory)
