"""Reads the file of an inventory. Owns its form and its errors, one line for each."""

from __future__ import annotations

import ipaddress
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from forge.cli.deploy.inventory.contradictions import contradictions
from forge.cli.deploy.inventory.inventory import LOCAL, BackupTimers, Host, Inventory
from forge.cli.deploy.inventory.kinds import (
    BACKUP,
    ETCD,
    KINDS,
    MOST_INSTANCES,
    RANKS,
    SERVICES,
    Instance,
    backup_of,
    env_name,
    instances_of,
)
from forge.cli.deploy.inventory.schedule import schedule_fault
from forge.cli.deploy.inventory.table_reader import Table, TableReader
from forge.core.errors import ConfigError, raise_all

_KEYS = (
    "cluster",
    "model",
    "checkpoints",
    "min_trainer_hosts",
    "certificate_days",
    "backup",
    "hosts",
    "settings",
)
_BACKUP_KEYS = ("at", "full_every", "keep")
_HOST_KEYS = ("address", "login", "names", "gpus", "services", "settings", "env")
_RENDERED = frozenset(
    {
        *("cluster", "etcd", "etcd_user", "etcd_password_file", "instance_id", "host"),
        *("key_file", "token_file", "tls_cert", "tls_key", "tls_ca", "insecure", "data_dir"),
    }
)
"""Settings that follow from the rest of the inventory."""
_PORTS = {"port": "FORGE_PORT", "metrics_port": "FORGE_METRICS_PORT"}
"""Settings of one instance, with their variables."""
_LABEL = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?")
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,62})")
_DURATION = re.compile(r"[0-9]+(\.[0-9]+)?[smhd]")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_MOST_DAYS = 3650
MOST_HOSTS = 4096
MOST_RANKS = 64
"""On one host."""


def read_inventory(text: str, *, source: str, release: str) -> Inventory:
    """Return the inventory in a TOML text. `release`: the one that renders.

    Raises `ConfigError`, or `InvalidArgument` with a line for each of several errors.
    """
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{source} is not TOML: {error}") from None
    reader = TableReader(source)
    inventory = _inventory(reader, table, release)
    if not reader.errors:
        for line in contradictions(inventory):
            reader.fail(line)
    raise_all(reader.errors)
    return inventory


def _inventory(reader: TableReader, table: Table, release: str) -> Inventory:
    reader.known("", table, _KEYS)
    hosts = reader.table("", table, "hosts")
    if not hosts and not reader.errors:
        reader.fail("no host is named; add [hosts.NAME] with its address")
    settings = reader.table("", table, "settings")
    _check_settings(reader, "settings.", settings)
    backup = _backup(reader, table)
    found = _with_ranks([_host(reader, name, one) for name, one in hosts.items()])
    return Inventory(
        cluster=reader.text("", table, "cluster", "default", _NAME),
        release=release,
        model=_path(reader, table, "model", "/var/lib/forge/models/policy"),
        checkpoints=_path(reader, table, "checkpoints", ""),
        min_trainer_hosts=reader.number("", table, "min_trainer_hosts", 0, (0, MOST_HOSTS)),
        certificate_days=reader.number("", table, "certificate_days", 365, (1, _MOST_DAYS)),
        hosts=_with_backups(found) if backup else found,
        settings=settings,
        backup=backup,
    )


def _path(reader: TableReader, table: Table, key: str, default: str) -> str:
    path = reader.text("", table, key, default)
    if path and not path.startswith("/"):
        reader.wrong(key, path, "an absolute path, the same on every host")
    return path


def _backup(reader: TableReader, table: Table) -> BackupTimers | None:
    if "backup" not in table:
        return None
    own = reader.table("", table, "backup")
    reader.known("backup.", own, _BACKUP_KEYS)
    at = reader.text("backup.", own, "at", "hourly")
    if fault := schedule_fault(at):
        reader.wrong("backup.at", at, fault)
    full_every = reader.text("backup.", own, "full_every", "7d")
    if not _DURATION.fullmatch(full_every):
        reader.wrong("backup.full_every", full_every, "a time like 12h or 7d")
    keep = reader.number("backup.", own, "keep", 4, (1, 1000))
    return BackupTimers(at=at, full_every=full_every, keep=keep)


def _with_ranks(hosts: Sequence[Host]) -> tuple[Host, ...]:
    """Return hosts with the unit of their ranks, numbered by their order."""
    numbers = {host.name: number for number, host in enumerate(one for one in hosts if one.ranks)}
    return tuple(
        replace(host, instances=_in_order(*host.instances, Instance(kind=RANKS, name=str(number))))
        if (number := numbers.get(host.name)) is not None
        else host
        for host in hosts
    )


def _in_order(*instances: Instance) -> tuple[Instance, ...]:
    kinds = list(KINDS)
    return tuple(sorted(instances, key=lambda one: kinds.index(one.kind)))


def _with_backups(hosts: Sequence[Host]) -> tuple[Host, ...]:
    """Return hosts with a timer for each shard, a replicated one on the first of its hosts."""
    replicas: set[str] = set()
    found = []
    for host in hosts:
        shards = [one for one in host.instances if KINDS[one.kind].service == "pool"]
        own = [one for one in shards if one.kind == "pool" or one.name not in replicas]
        replicas |= {one.name for one in own if one.kind == "pool-replica"}
        found.append(replace(host, instances=(*host.instances, *map(backup_of, own))))
    return tuple(found)


def _host(reader: TableReader, name: str, table: Any) -> Host:
    prefix = f"hosts.{name}."
    if not _LABEL.fullmatch(name):
        reader.wrong("hosts", name, "a host name without the domain, as `uname -n` prints it")
    if not isinstance(table, dict):
        reader.wrong(f"hosts.{name}", table, f"a table [hosts.{name}]")
        return Host(name=name, address="", login=LOCAL)
    reader.known(prefix, table, _HOST_KEYS)
    address = reader.text(prefix, table, "address", "")
    if not _is_address(address):
        reader.wrong(f"{prefix}address", address, "an IP address or DNS name that others reach")
    names = reader.texts(prefix, table, "names")
    for one in names:
        if not _is_address(one.removeprefix("*.")):
            reader.wrong(f"{prefix}names", one, "an IP address or DNS name for its certificate")
    settings = reader.table(prefix, table, "settings")
    _check_settings(reader, f"{prefix}settings.", settings)
    services = reader.table(prefix, table, "services")
    instances = tuple(_instances(reader, f"{prefix}services.", services))
    ranks = reader.number(f"{prefix}services.", services, RANKS, 0, (0, MOST_RANKS))
    named = [*map(env_name, instances), *([RANKS] if ranks else [])]
    return Host(
        name=name,
        address=address,
        login=reader.text(prefix, table, "login", f"root@{address}"),
        names=names,
        gpus=reader.number(prefix, table, "gpus", 0, (0, 64)),
        ranks=ranks,
        etcd=bool(reader.number(f"{prefix}services.", services, ETCD, 0, (0, 1))),
        instances=instances,
        settings=settings,
        env=_env(reader, f"{prefix}env.", reader.table(prefix, table, "env"), named),
    )


def _instances(reader: TableReader, prefix: str, table: Table) -> Iterator[Instance]:
    counted = [kind for kind in KINDS if kind not in (BACKUP, RANKS)]
    reader.known(prefix, table, (*counted, RANKS, ETCD))
    for kind in counted:
        if KINDS[kind].is_named:
            for name in _distinct(reader, prefix, table, kind):
                # A number is a shard of one host: its instance would have the same id.
                if _NAME.fullmatch(name) and name[0].isalpha():
                    yield Instance(kind=kind, name=name)
                else:
                    allowed = "names that begin with a letter, of letters, digits and -_."
                    reader.wrong(prefix + kind, name, allowed)
        else:
            count = reader.number(prefix, table, kind, 0, (0, MOST_INSTANCES))
            yield from instances_of(kind, count)


def _distinct(reader: TableReader, prefix: str, table: Table, kind: str) -> tuple[str, ...]:
    names = reader.texts(prefix, table, kind)
    if len({*names}) < len(names):
        reader.wrong(prefix + kind, list(names), "each name once")
        return ()
    return names


def _env(
    reader: TableReader, prefix: str, table: Table, names: Collection[str]
) -> Mapping[str, Mapping[str, str]]:
    if table and not names:
        text = f"there is no key {prefix}{next(iter(table))}; no instance takes variables here"
        reader.fail(text)
        return {}
    reader.known(prefix, table, names)
    found = {}
    for name in table:
        variables = reader.table(prefix, table, name)
        for variable, value in variables.items():
            key = f"{prefix}{name}.{variable}"
            if not _VARIABLE.fullmatch(variable):
                reader.wrong(key, value, "a variable's name: letters, digits and underscores")
            elif not isinstance(value, str) or "\n" in value:
                reader.wrong(key, value, f'a text of one line, like {variable} = "1"')
        found[name] = dict(variables)
    return found


def _check_settings(reader: TableReader, prefix: str, table: Table) -> None:
    reader.known(prefix, table, SERVICES)
    for service in table:
        for key, value in reader.table(prefix, table, service).items():
            if key in _RENDERED:
                reader.wrong(
                    f"{prefix}{service}.{key}",
                    value,
                    "it follows from the hosts of the inventory; remove it",
                )
            elif key in _PORTS:
                reader.wrong(
                    f"{prefix}{service}.{key}",
                    value,
                    f"each instance has its own; set {_PORTS[key]} in [hosts.NAME.env.INSTANCE]",
                )


def _is_address(address: str) -> bool:
    try:
        ipaddress.ip_address(address)
        return True
    except ValueError:
        labels = address.split(".")
        return all(map(_LABEL.fullmatch, labels)) and not labels[-1].isdigit()
