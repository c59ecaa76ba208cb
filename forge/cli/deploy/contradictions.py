"""What an inventory as a whole must not say: values that are right by themselves. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from forge.cli.deploy.kinds import KINDS, env_name
from forge.runtime.security.tls import is_loopback

if TYPE_CHECKING:
    from forge.cli.deploy.inventory import Inventory


def contradictions(inventory: Inventory) -> Iterator[str]:
    """Yield a line for each contradiction."""
    members = len(inventory.members)
    if members == 0:
        yield "no host has services.etcd = 1; give it to one host, or to three"
    elif members % 2 == 0:
        yield f"{members} hosts have services.etcd = 1; an even number survives no more losses " + (
            f"than {members - 1}: name {members - 1} or {members + 1}"
        )
    yield from _twice("address", {host.name: host.address for host in inventory.hosts})
    yield from _replicas(inventory)
    for host in inventory.hosts:
        if len(inventory.hosts) > 1 and is_loopback(host.address):
            yield (
                f"hosts.{host.name}.address = {host.address!r} is not allowed: other hosts do not "
                "reach it; name one of the network"
            )
        if not host.units:
            yield f"hosts.{host.name}.services is empty; name a service, or remove the host"
        users = [one for one in host.instances if KINDS[one.kind].uses_gpu]
        automatic = [
            one for one in users if "CUDA_VISIBLE_DEVICES" not in host.env.get(env_name(one), {})
        ]
        if host.gpus and len(automatic) > host.gpus:
            yield (
                f"hosts.{host.name}.gpus = {host.gpus} is not allowed: {len(automatic)} workers "
                "and trainers take one each; raise it, run fewer, or set CUDA_VISIBLE_DEVICES of "
                f"some in [hosts.{host.name}.env.INSTANCE]"
            )


def _twice(key: str, values: Mapping[str, str]) -> Iterator[str]:
    owners: dict[str, str] = {}
    for name, value in values.items():
        if value in owners:
            yield (
                f"hosts.{name}.{key} = {value!r} is not allowed: it is that of "
                f"hosts.{owners[value]}; give each host its own"
            )
        owners.setdefault(value, name)


def _replicas(inventory: Inventory) -> Iterator[str]:
    hosts: dict[str, list[str]] = {}
    for host in inventory.hosts:
        for one in host.instances:
            if one.kind == "pool-replica":
                hosts.setdefault(one.name, []).append(host.name)
    for shard, names in hosts.items():
        if len(names) != 2:
            yield (
                f"pool-replica {shard!r} is on {', '.join(names)}; a replicated shard is on two "
                "hosts, once each"
            )
