"""The inventory of a cluster: hosts, what each runs, and settings. Not here: its file
(`inventory_file`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from forge.cli.deploy.inventory.kinds import KINDS, RANKS, Instance
from forge.cli.deploy.inventory.table_reader import Table

LOCAL = "local"
"""`login` of the computer on which the commands run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One host."""

    name: str
    """The host name without the domain: ids of instances have it."""
    address: str
    """IP address or DNS name at which all others reach it."""
    login: str
    """For ssh, or `local`."""
    names: tuple[str, ...] = ()
    """Further names in its certificate."""
    gpus: int = 0
    ranks: int = 0
    """Number of ranks of the trainer."""
    etcd: bool = False
    instances: tuple[Instance, ...] = ()
    """In the order of a roll."""
    settings: Table = field(default_factory=dict)
    """By service; they win over those of the cluster."""
    env: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Variables by name of the instance, `decode-1` or `gateway-1`."""

    @property
    def units(self) -> list[str]:
        """The host's units, etcd first."""
        etcd = ["forge-etcd.service"] if self.etcd else []
        return etcd + [one.unit for one in self.instances]

    @property
    def has_key(self) -> bool:
        """Whether one of its services has the cluster's key; the applying host needs it too."""
        return self.etcd or any(KINDS[one.kind].has_key for one in self.instances)

    @property
    def runs_agents(self) -> bool:
        """Whether it has runners."""
        return "agents-token" in self.credentials

    @property
    def credentials(self) -> set[str]:
        """Files below /etc/forge that its units read: the cluster's key, and tokens."""
        return {KINDS[one.kind].credential for one in self.instances} - {""}


@dataclass(frozen=True, slots=True, kw_only=True)
class BackupTimers:
    """Timers that back up each shard, a replicated one on the first of its hosts."""

    at: str
    """Time, as systemd's OnCalendar."""
    full_every: str
    """Age of a full backup that is followed by another; increments are between them."""
    keep: int
    """Full backups, with their increments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """A cluster."""

    cluster: str
    release: str
    model: str
    checkpoints: str
    certificate_days: int
    hosts: tuple[Host, ...]
    settings: Table
    min_trainer_hosts: int = 0
    """Fewest hosts with `trainer-rank` on which the trainer continues; 0: all of them."""
    backup: BackupTimers | None = None
    """None: no shard has a timer."""

    @property
    def etcd(self) -> str:
        """The endpoints of all members."""
        return ",".join(f"https://{bracketed(one.address)}:2379" for one in self.members)

    @property
    def members(self) -> list[Host]:
        """The hosts of etcd."""
        return [host for host in self.hosts if host.etcd]

    @property
    def admin(self) -> Host:
        """The host that has etcd's root password and applies users and roles."""
        return self.members[0]

    @property
    def rank_hosts(self) -> list[Host]:
        """The hosts with ranks of the trainer; the first has rank 0."""
        return [host for host in self.hosts if host.ranks]

    @property
    def is_elastic(self) -> bool:
        """Whether the trainer continues without some of its hosts."""
        return 0 < self.min_trainer_hosts < len(self.rank_hosts)

    @property
    def runner_hosts(self) -> list[str]:
        """The hosts with runners."""
        return [host.name for host in self.hosts if host.runs_agents]

    def missing(self) -> list[str]:
        """Kinds of services that a training cluster needs and no host runs."""
        present = {one.kind for host in self.hosts for one in host.instances}
        if RANKS in present:
            present.add("trainer")
        if "both" in present:
            present |= {"prefill", "decode"}
        if "pool-replica" in present:
            present.add("pool")
        present |= {"both", "pool-replica"}
        needed = (name for name, kind in KINDS.items() if not kind.is_optional)
        return [name for name in needed if name not in present]


def bracketed(address: str) -> str:
    """Return an address for use before a port."""
    return f"[{address}]" if ":" in address else address
