"""What a host of an inventory can run: units, settings, ports and the order of a roll."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

MOST_INSTANCES = 9
"""Of a kind on one host: ports end with the number of the instance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of process."""

    unit: str
    """Name of the template unit, without `@.service`."""
    service: str
    """Name of the settings file and of the password in etcd."""
    ports: tuple[int, int] | None = None
    """Ports of gRPC and /metrics, without the instance's digit; None: free ones."""
    http_port: int = 0
    """Default of `http.port`; 0: no HTTP."""
    role: str = ""
    """FORGE_ROLE, of inference."""
    uses_gpu: bool = False
    reads_model: bool = False
    has_key: bool = True
    """Whether its unit reads the cluster's key."""
    drains: bool = False
    """Whether it takes calls of DrainService."""


KINDS: Mapping[str, Kind] = {
    "pool": Kind(unit="forge-pool", service="pool", ports=(721, 921)),
    "pool-replica": Kind(unit="forge-pool-replica", service="pool"),
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
    "gateway": Kind(
        unit="forge-gateway",
        service="gateway",
        ports=(723, 923),
        http_port=8000,
        reads_model=True,
    ),
    # Without the key it verifies no call, so it drains at its stop alone.
    "agents": Kind(unit="forge-agents", service="agents", ports=(726, 926), has_key=False),
    "console": Kind(
        unit="forge-console",
        service="console",
        ports=(727, 927),
        http_port=7800,
        reads_model=True,
    ),
}
"""By name in an inventory, in the order of a roll: what serves others comes first."""

ETCD = "etcd"
"""The name of an etcd member in an inventory; it has no instances."""
SERVICES = tuple(dict.fromkeys(kind.service for kind in KINDS.values()))


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Instance:
    """One process of a host."""

    kind: str
    name: str
    """Instance of the unit, such as `1`, `decode-1`, or the name of a replicated shard."""

    @property
    def unit(self) -> str:
        """The name of its unit."""
        return f"{KINDS[self.kind].unit}@{self.name}.service"

    @property
    def number(self) -> int:
        """Its number among those of its kind on the host; 1 for a replica."""
        digits = self.name.rpartition("-")[2]
        return int(digits) if digits.isdigit() and self.kind != "pool-replica" else 1

    @property
    def ports(self) -> tuple[int, ...]:
        """Its fixed ports of gRPC and /metrics."""
        ports = KINDS[self.kind].ports or ()
        return tuple(port * 10 + self.number for port in ports)

    def instance_id(self, host: str) -> str:
        """Its id in discovery, as its unit sets it."""
        return f"{KINDS[self.kind].unit.split('-')[1]}-{host}-{self.name}"


def instances_of(kind: str, count: int) -> list[Instance]:
    """Return numbered instances of a kind."""
    prefix = f"{kind}-" if KINDS[kind].role else ""
    return [Instance(kind=kind, name=f"{prefix}{number}") for number in range(1, count + 1)]
