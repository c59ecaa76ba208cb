"""Contradictions in an inventory, between values that are valid by themselves. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from forge.cli.deploy.inventory.inventory import Host, Inventory
from forge.cli.deploy.inventory.kinds import KINDS, RANK_PORT, RANKS, Instance, env_name
from forge.runtime.security.tls import is_loopback

_PORT = "FORGE_PORT"


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
    yield from _ranks(inventory)
    for host in inventory.hosts:
        if len(inventory.hosts) > 1 and is_loopback(host.address):
            yield (
                f"hosts.{host.name}.address = {host.address!r} is not allowed: other hosts do not "
                "reach it; name one of the network"
            )
        if not host.units:
            yield f"hosts.{host.name}.services is empty; name a service, or remove the host"
        taken = sum(gpus_taken(host, one) for one in host.instances)
        if host.gpus and taken > host.gpus:
            yield (
                f"hosts.{host.name}.gpus = {host.gpus} is not allowed: {taken} workers, "
                "trainers and ranks take one each; raise it, run fewer, or set "
                f"CUDA_VISIBLE_DEVICES of some in [hosts.{host.name}.env.INSTANCE]"
            )


def gpus_taken(host: Host, one: Instance) -> int:
    """Return the number of GPUs that an instance takes of those of its host, by itself."""
    own = host.env.get(env_name(one), {})
    if not KINDS[one.kind].uses_gpu or "CUDA_VISIBLE_DEVICES" in own:
        return 0
    return host.ranks if one.kind == RANKS else 1


def _ranks(inventory: Inventory) -> Iterator[str]:
    """The ranks of a trainer are alike on all of its hosts."""
    hosts = inventory.rank_hosts
    yield from _elastic(inventory)
    if not hosts:
        return
    first, *others = hosts
    for host in inventory.hosts:
        if any(one.kind == "trainer" for one in host.instances):
            yield (
                f"hosts.{host.name}.services.trainer is not allowed beside hosts.{first.name}."
                "services.trainer-rank: the ranks are the trainer"
            )
    for host in others:
        if host.ranks != first.ranks:
            yield (
                f"hosts.{host.name}.services.trainer-rank = {host.ranks} is not allowed: "
                f"hosts.{first.name} has {first.ranks}, and each host has the same number"
            )
        if bool(host.gpus) != bool(first.gpus):
            yield (
                f"hosts.{host.name}.gpus = {host.gpus} is not allowed: all ranks of the trainer "
                f"have GPUs, or none has, and hosts.{first.name}.gpus = {first.gpus}"
            )
    if others and not inventory.checkpoints:
        yield (
            "checkpoints = '' is not allowed with trainer-rank on several hosts: name a directory "
            "that all of them mount"
        )
    for host in hosts:
        yield from _rank_ports(inventory, host)
    tables = {"": inventory.settings, **{f"hosts.{one.name}.": one.settings for one in hosts}}
    for prefix, table in tables.items():
        if "ranks" in table.get("trainer", {}):
            yield (
                f"{prefix}settings.trainer.ranks is not allowed with trainer-rank: it follows from "
                "the hosts; remove it"
            )


def _elastic(inventory: Inventory) -> Iterator[str]:
    """A number of hosts that may change."""
    fewest, hosts = inventory.min_trainer_hosts, inventory.rank_hosts
    if fewest > len(hosts):
        yield (
            f"min_trainer_hosts = {fewest} is not allowed: {len(hosts)} of the hosts "
            "have services.trainer-rank"
        )
    elif inventory.is_elastic:
        # torchrun gives rank 0 to this one, and the first one has the unit of rank 0.
        low = min(hosts, key=lambda one: one.address)
        if low != hosts[0]:
            yield (
                f"hosts.{hosts[0].name} must not be the first host with trainer-rank: with "
                f"min_trainer_hosts rank 0 is on the host whose address is the first as a text; "
                f"put hosts.{low.name} ({low.address}) before it"
            )


def _rank_ports(inventory: Inventory, host: Host) -> Iterator[str]:
    """Ranks that publish serve at consecutive ports, which may reach those of other services."""
    settings = (host.settings.get("trainer", {}), inventory.settings.get("trainer", {}))
    published = next((one["publish_from"] for one in settings if "publish_from" in one), "")
    own = host.env.get(RANKS, {}).get(_PORT, "")
    first = int(own) if own.isdigit() else RANK_PORT
    if published != "ranks" or not first:
        return
    for one in (each for each in host.instances if each.kind != RANKS):
        chosen = host.env.get(env_name(one), {}).get(_PORT, "")
        port = int(chosen) if chosen.isdigit() else one.ports.get("grpc", 0)
        if first <= port < first + host.ranks:
            yield (
                f"hosts.{host.name}.services.trainer-rank = {host.ranks} is not allowed with "
                f"publish_from = 'ranks': its ports from {first} on reach {port} of {one.unit}; "
                f"set {_PORT} to the first of {host.ranks} free ones in "
                f"[hosts.{host.name}.env.trainer-rank]"
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
