"""Files with their content, units and ports of each host, from the inventory.

Pure. Not here: secrets are made in `secrets`, files are written in `render`.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from forge.cli.deploy.inventory.contradictions import gpus_taken
from forge.cli.deploy.inventory.inventory import Host, Inventory, bracketed
from forge.cli.deploy.inventory.kinds import (
    BACKUP,
    ETCD,
    KINDS,
    RANKS,
    SERVICES,
    Instance,
    env_name,
)
from forge.cli.deploy.render.rendered import (
    PLAIN,
    SECRET,
    HostFile,
    Manifest,
    RenderedHost,
    TokenEntry,
    UnitEntry,
    entries,
)
from forge.runtime.settings import toml

UNITS = "/etc/systemd/system"
SETTINGS = "/etc/forge"
ADMIN_PASSWORDS = f"{SETTINGS}/etcd-users"
"""Directory of `forge etcd apply` on the admin's host."""
KEY = f"{SETTINGS}/key"
FEEDS = "/var/lib/forge/feed"
"""Directory of the tasks that feeds submit."""
_HEAD = "# Rendered by `forge deploy render`: a change here is lost. Edit the inventory instead.\n"
_DROP_INS = ("systemd", "systemd-tls")
_CPU = {"device": "cpu", "dtype": "float32"}
_GPU = {"device": "cuda:0", "autocast": "auto", "publish_dtype": "auto"}
_BARE = re.compile(r"[A-Za-z0-9_-]+")
_PORT_VARIABLES = {
    "grpc": "FORGE_PORT",
    "metrics": "FORGE_METRICS_PORT",
    "http": "FORGE_HTTP__PORT",
}

Assets = Mapping[str, bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSecrets:
    """PEM files and token of one host."""

    cert: bytes
    key: bytes
    tokens: Mapping[str, str] = field(default_factory=dict)
    """By file below /etc/forge: of its runners and feeds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Secrets:
    """All secrets of a cluster."""

    key: bytes
    ca: bytes
    """Trusted certificates, PEM."""
    passwords: Mapping[str, str]
    """Passwords of users in etcd, by service: `root`, `pool`, `runner@forge-1`."""
    hosts: Mapping[str, HostSecrets]
    tokens: tuple[TokenEntry, ...]


def rendered_host(
    inventory: Inventory, host: Host, assets: Assets, secrets: Secrets
) -> RenderedHost:
    """Return all files and units of a host."""
    files = (
        *_unit_files(inventory, host, assets),
        *_settings_files(inventory, host, assets),
        *_secret_files(inventory, host, secrets),
    )
    paths = [one.path for one in files]
    manifest = Manifest(
        cluster=inventory.cluster,
        host=host.name,
        address=host.address,
        release=inventory.release,
        etcd=inventory.etcd,
        has_key=host.has_key,
        is_admin=host == inventory.admin,
        users=_users(assets),
        model=inventory.model if any(KINDS[one.kind].reads_model for one in host.instances) else "",
        files=entries(files),
        units=tuple(_units(inventory, host, assets, paths)),
        runner_hosts=tuple(inventory.runner_hosts) if host == inventory.admin else (),
        tokens=secrets.tokens if host == inventory.admin else (),
        data=tuple(f"{FEEDS}/{one.name}.jsonl" for one in host.instances if one.kind == "feed"),
    )
    return RenderedHost(manifest=manifest, files=files)


def _users(assets: Assets) -> tuple[str, ...]:
    lines = assets["sysusers.d/forge.conf"].decode().splitlines()
    return tuple(line.split()[1] for line in lines if line.startswith("u "))


def _unit_files(inventory: Inventory, host: Host, assets: Assets) -> Iterator[HostFile]:
    kinds = {one.kind: KINDS[one.kind] for one in host.instances}.values()
    names = {f"{kind.unit}@.service" for kind in kinds} | {"forge-.service", "forge.target"}
    names |= {one.unit for one in host.instances}
    names |= {f"{kind.unit}@.timer" for kind in kinds if kind.is_timer}
    names |= {"forge-etcd.service"} if host.etcd else set()
    for path, content in assets.items():
        folder, _, name = path.partition("/")
        if folder in _DROP_INS and name.partition(".d/")[0] in names:
            yield HostFile(path=f"{UNITS}/{name}", content=content)
        elif folder in ("sysusers.d", "tmpfiles.d"):
            yield HostFile(path=f"/etc/{path}", content=content)
    trainers = [kind.unit for kind in kinds if kind.service == "trainer"]
    if inventory.checkpoints and trainers:
        directory = inventory.checkpoints
        yield _text(
            f"{UNITS}/{trainers[0]}@.service.d/20-shared.conf",
            f"[Unit]\nRequiresMountsFor={directory}\n[Service]\n"
            f"Environment=FORGE_CHECKPOINT__DIR={directory}\nReadWritePaths={directory}\n",
        )
        owner = "0700 forge-trainer forge-trainer -"
        yield _text("/etc/tmpfiles.d/forge-checkpoints.conf", f"z {directory} {owner}\n")
    if inventory.backup and f"{KINDS[BACKUP].unit}@.timer" in names:
        yield _text(
            f"{UNITS}/{KINDS[BACKUP].unit}@.timer.d/20-schedule.conf",
            # An empty value removes the one of the unit.
            f"[Timer]\nOnCalendar=\nOnCalendar={inventory.backup.at}\n",
        )


def _settings_files(inventory: Inventory, host: Host, assets: Assets) -> Iterator[HostFile]:
    for service in _services(host):
        table = _settings(inventory, host, service, assets)
        yield _text(f"{SETTINGS}/{service}.toml", to_toml(table))
    gpus = iter(range(host.gpus))
    for one in host.instances:
        variables = _variables(inventory, host, one, gpus, assets)
        lines = "".join(f"{name}={_quoted(value)}\n" for name, value in variables.items())
        if lines:
            # A variable may be the key of a judge.
            yield _text(f"{SETTINGS}/{one.env_file}", lines, mode=SECRET)
    if host.etcd:
        yield _text(f"{SETTINGS}/etcd.env", _etcd_env(host))
        # Its own file, and no input of the unit: a member with data ignores it.
        members = ",".join(f"{one.name}={_peer_url(one)}" for one in inventory.members)
        yield _text(f"{SETTINGS}/etcd-members.env", f"ETCD_INITIAL_CLUSTER={members}\n")
    if host.has_key:
        yield _text("/etc/profile.d/forge.sh", _profile(inventory))
    kinds = {one.kind for one in host.instances}
    if inventory.backup and BACKUP in kinds:
        options = f"--full-every {inventory.backup.full_every} --keep {inventory.backup.keep}"
        yield _text(f"{SETTINGS}/pool-backup.env", f'FORGE_BACKUP="{options}"\n')
    if "feed" in kinds:
        address = f"FORGE_ETCD={inventory.etcd}\nFORGE_CLUSTER={inventory.cluster}\n"
        yield _text(f"{SETTINGS}/feed.env", address)
    if host.ranks:
        yield _text(f"{SETTINGS}/trainer-rank.env", _rank_env(inventory))


def _services(host: Host) -> list[str]:
    present = {KINDS[one.kind].service for one in host.instances}
    return [service for service in SERVICES if service in present]


def _settings(inventory: Inventory, host: Host, service: str, assets: Assets) -> dict[str, Any]:
    """The distribution's file, then the inventory's settings, then what follows from the hosts."""
    table = tomllib.loads(assets[f"config/{service}.toml"].decode())
    if service == "inference" and not host.gpus:
        table |= _CPU
    if service == "trainer" and host.gpus:
        table |= _GPU
    if "model_path" in table:
        table["model_path"] = inventory.model
    ranks = sum(one.ranks for one in inventory.rank_hosts)
    if service == "trainer" and ranks:
        # torchrun gives each its device.
        table |= {
            "ranks": ranks,
            "mesh": {"dp_shard": 0 if inventory.is_elastic else ranks},
            "device": "cuda" if host.gpus else "cpu",
        }
    table = _merged(table, inventory.settings.get(service, {}))
    table = _merged(table, host.settings.get(service, {}))
    table |= {"cluster": inventory.cluster, "etcd": inventory.etcd, "host": host.address}
    if service == "agents":
        table["etcd_user"] = f"{inventory.cluster}.runner@{host.name}"
    return table


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merged(merged[key], value) if both else value
    return merged


def _variables(
    inventory: Inventory, host: Host, one: Instance, gpus: Iterator[int], assets: Assets
) -> dict[str, str]:
    kind, own = KINDS[one.kind], host.env.get(env_name(one), {})
    variables = {"FORGE_ROLE": kind.role} if kind.role else {}
    if host.gpus and (taken := gpus_taken(host, one)):
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(str(next(gpus)) for _ in range(taken))
    if kind.http_port and one.number > 1:
        variables["FORGE_HTTP__PORT"] = str(_http_port(inventory, host, one, assets))
    if one.kind == RANKS and inventory.is_elastic:
        # Other hosts may not resolve its name.
        variables["PET_LOCAL_ADDR"] = host.address
    return {**variables, **own}


def _http_port(inventory: Inventory, host: Host, one: Instance, assets: Assets) -> int:
    kind = KINDS[one.kind]
    table = _settings(inventory, host, kind.service, assets).get("http", {})
    port = int(table.get("port", kind.http_port))
    return port + one.number - 1 if port else 0


def _quoted(value: str) -> str:
    """A value as systemd and shells read it from an environment file."""
    if value and not set(value) & set(" \t'\"\\$#;`"):
        return value
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _etcd_env(host: Host) -> str:
    client = f"https://{bracketed(host.address)}:2379"
    return "".join(
        f"{name}={value}\n"
        for name, value in {
            "ETCD_NAME": host.name,
            "ETCD_LISTEN_CLIENT_URLS": client,
            "ETCD_ADVERTISE_CLIENT_URLS": client,
            "ETCD_LISTEN_PEER_URLS": _peer_url(host),
            "ETCD_INITIAL_ADVERTISE_PEER_URLS": _peer_url(host),
            # An empty disk makes no second cluster; `etcd_start` makes the first one.
            "ETCD_INITIAL_CLUSTER_STATE": "existing",
        }.items()
    )


def _peer_url(host: Host) -> str:
    return f"https://{bracketed(host.address)}:2380"


def _rank_env(inventory: Inventory) -> str:
    """Variables of torchrun, equal on all hosts of the trainer."""
    first, hosts = inventory.rank_hosts[0], str(len(inventory.rank_hosts))
    meeting = f"PET_MASTER_ADDR={first.address}\n"
    if inventory.is_elastic:
        hosts = f"{inventory.min_trainer_hosts}:{hosts}"
        # A directory that all hosts mount: they meet without any of them.
        endpoint = f"{inventory.checkpoints.rstrip('/')}/hosts"
        meeting = f"PET_RDZV_BACKEND=c10d\nPET_RDZV_ENDPOINT={endpoint}\n"
    directory = inventory.checkpoints or "/var/lib/forge/trainer-rank-0"
    return (
        f"PET_NNODES={hosts}\nPET_NPROC_PER_NODE={first.ranks}\n"
        f"{meeting}FORGE_CHECKPOINT__DIR={directory}\n"
    )


def _profile(inventory: Inventory) -> str:
    """The connection of login shells."""
    tls = f"{SETTINGS}/tls"
    return (
        "export PATH=/opt/forge/.venv/bin:$PATH\n"
        f"export FORGE_ETCD={inventory.etcd} FORGE_CLUSTER={inventory.cluster}\n"
        f"export FORGE_TLS_CERT={tls}/tls_cert.pem FORGE_TLS_KEY={tls}/tls_key.pem\n"
        f"export FORGE_TLS_CA={tls}/tls_ca.pem FORGE_KEY_FILE={KEY}\n"
        f"export FORGE_ETCD_PASSWORD_FILE={SETTINGS}/etcd/forge-operator\n"
        "export ETCDCTL_ENDPOINTS=$FORGE_ETCD ETCDCTL_CACERT=$FORGE_TLS_CA\n"
        "export ETCDCTL_CERT=$FORGE_TLS_CERT ETCDCTL_KEY=$FORGE_TLS_KEY\n"
    )


def _secret_files(inventory: Inventory, host: Host, secrets: Secrets) -> Iterator[HostFile]:
    own = secrets.hosts[host.name]
    yield HostFile(path=f"{SETTINGS}/tls/tls_cert.pem", content=own.cert)
    yield HostFile(path=f"{SETTINGS}/tls/tls_ca.pem", content=secrets.ca)
    yield HostFile(path=f"{SETTINGS}/tls/tls_key.pem", content=own.key, mode=SECRET)
    if host.has_key:
        yield HostFile(path=KEY, content=secrets.key, mode=SECRET)
        yield _password("forge-operator", secrets.passwords["operator"])
    for name, token in own.tokens.items():
        yield HostFile(path=f"{SETTINGS}/{name}", content=f"{token}\n".encode(), mode=SECRET)
    passwords = {KINDS[one.kind].unit: KINDS[one.kind].password for one in host.instances}
    for unit, service in sorted(passwords.items()):
        if service:
            owner = f"runner@{host.name}" if service == "agents" else service
            yield _password(unit, secrets.passwords[owner])
    if host == inventory.admin:
        yield _password("forge-admin", secrets.passwords["admin"])
        # Where the run-books read it.
        yield _password("root", secrets.passwords["root"])
        for service, password in secrets.passwords.items():
            name = service if service == "root" else f"forge-{service}"
            yield _password(name, password, directory=ADMIN_PASSWORDS)


def _password(name: str, password: str, *, directory: str = f"{SETTINGS}/etcd") -> HostFile:
    content = f"{password}\n".encode()
    return HostFile(path=f"{directory}/{name}", content=content, mode=SECRET)


def _units(
    inventory: Inventory, host: Host, assets: Assets, paths: list[str]
) -> Iterator[UnitEntry]:
    shared = [path for path in paths if "/forge-.service.d/" in path or "/tls/" in path]
    if host.etcd:
        own = [f"{SETTINGS}/etcd.env", *_below(paths, "forge-etcd.service")]
        ports = {"client": 2379, "peer": 2380}
        inputs = tuple(sorted([*shared, *own]))
        yield UnitEntry(name="forge-etcd.service", kind=ETCD, inputs=inputs, ports=ports)
    for one in host.instances:
        yield UnitEntry(
            name=one.unit,
            kind=one.kind,
            instance_id=one.instance_id(host.name),
            inputs=tuple(sorted(_inputs(one, paths, shared))),
            ports=_ports(inventory, host, one, assets),
        )


def _inputs(one: Instance, paths: list[str], shared: list[str]) -> list[str]:
    """The files that a unit reads at its start."""
    kind = KINDS[one.kind]
    if kind.is_timer:
        return _below(paths, f"{kind.unit}@.timer")
    service, etcd = f"{SETTINGS}/{kind.service}.toml", f"{SETTINGS}/etcd/{kind.unit}"
    of_all = f"{SETTINGS}/{kind.unit.removeprefix('forge-')}.env"
    credential = f"{SETTINGS}/{kind.credential}"
    read = (service, of_all, f"{SETTINGS}/{one.env_file}", credential, etcd)
    own = [path for path in read if path in paths]
    return [*shared, *own, *_below(paths, f"{kind.unit}@.service"), *_below(paths, one.unit)]


def _ports(inventory: Inventory, host: Host, one: Instance, assets: Assets) -> dict[str, int]:
    ports = one.ports
    if one.kind == RANKS and inventory.is_elastic:
        ports.pop("meeting", None)
    if KINDS[one.kind].http_port and (port := _http_port(inventory, host, one, assets)):
        ports["http"] = port
    for purpose, variable in _PORT_VARIABLES.items():
        if (chosen := host.env.get(env_name(one), {}).get(variable, "")).isdigit():
            ports[purpose] = int(chosen)
    return {purpose: port for purpose, port in ports.items() if port}


def _below(paths: list[str], unit: str) -> list[str]:
    """The file of a unit and its drop-ins."""
    start = f"{UNITS}/{unit}"
    return [path for path in paths if path == start or path.startswith(f"{start}.d/")]


def _text(path: str, text: str, *, mode: int = PLAIN) -> HostFile:
    return HostFile(path=path, content=(_HEAD + text).encode(), mode=mode)


def to_toml(table: Mapping[str, Any], prefix: str = "") -> str:
    """Return a table as TOML, tables last."""
    plain = [f"{_key(key)} = {toml(value)}" for key, value in table.items() if _is_plain(value)]
    lines = [*(f"[{prefix}]" for _ in plain[:1] if prefix), *plain]
    text = "\n".join(lines) + "\n" * bool(lines)
    for key, value in table.items():
        if not _is_plain(value):
            text += "\n" + to_toml(value, f"{prefix}.{_key(key)}".removeprefix("."))
    return text


def _key(key: str) -> str:
    return key if _BARE.fullmatch(key) else toml(key)


def _is_plain(value: Any) -> bool:
    return not isinstance(value, dict)
