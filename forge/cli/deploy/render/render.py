"""Writes the files of every host of an inventory. Owns the directory; `host_files` its content.

OUT/inventory.toml      copy of the inventory
OUT/secrets/            CA, key, passwords, tokens; stays on this computer
OUT/hosts/NAME/         manifest.json and root/, for the host NAME
"""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from forge.cli.deploy.inventory.inventory import Host, Inventory
from forge.cli.deploy.inventory.inventory_file import read_inventory
from forge.cli.deploy.inventory.kinds import KINDS, env_name
from forge.cli.deploy.render.assets import read_assets
from forge.cli.deploy.render.host_files import rendered_host
from forge.cli.deploy.render.rendered import (
    MANIFEST,
    SECRET,
    TREE,
    Manifest,
    RenderedHost,
    manifest_text,
    read_manifest,
)
from forge.cli.deploy.render.secrets import SecretStore
from forge.cli.queue.command import queue_app
from forge.cli.service_settings import MODULES, PrintedSettings, Program, print_settings
from forge.cli.usage_errors import USAGE_ERROR, usage_error
from forge.core.errors import ConfigError, InvalidArgument, raise_all
from forge.runtime.files.sync import errors_named

INVENTORY, SECRETS, HOSTS = "inventory.toml", "secrets", "hosts"


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderResult:
    """Result of a render."""

    inventory: Inventory
    secrets: list[str]
    """A line for each new secret."""
    files: dict[str, int]
    """By host."""
    changed: dict[str, list[str]]
    """Paths of new, changed and removed files, by host."""


def render(
    text: str,
    out: Path,
    *,
    source: str,
    release: str,
    rotate: Collection[str] = (),
    check_settings: bool = True,
) -> RenderResult:
    """Write the files of all hosts. A second call with the same text writes nothing.

    `check_settings`: ask each service for wrong settings first. Raises `InvalidArgument` with a
    line for each error; then no host's file is changed.
    """
    inventory = read_inventory(text, source=source, release=release)
    raise_all([ConfigError(f"{source}: {line}") for line in _feed_faults(inventory)])
    assets = read_assets()
    private_folder(out)
    private_folder(out / HOSTS)
    store = SecretStore(folder=out / SECRETS, rotate=rotate)
    secrets = store.load(inventory)
    rendered = [rendered_host(inventory, host, assets, secrets) for host in inventory.hosts]
    raise_all([ConfigError(f"{source}: {line}") for one in rendered for line in _twice(one)])
    if check_settings:
        _check_settings(inventory, rendered, out / "settings.checked", source)
    try:
        changed = {one.manifest.host: _write_host(out / HOSTS, one) for one in rendered}
        for folder in sorted((out / HOSTS).iterdir()):
            if folder.name not in changed:
                shutil.rmtree(folder)
                changed[folder.name] = ["all: the host is no longer in the inventory"]
        _write(out / INVENTORY, text.encode(), SECRET)
    except OSError as error:
        raise InvalidArgument(f"{error.filename}: {error.strerror}") from None
    return RenderResult(
        inventory=inventory,
        secrets=store.changes,
        files={one.manifest.host: len(one.files) for one in rendered},
        changed=changed,
    )


def rendered_hosts(out: Path) -> dict[str, Manifest]:
    """Return the manifests below a directory of `render`, by host. Raises `InvalidArgument`."""
    folders = sorted((out / HOSTS).glob(f"*/{MANIFEST}"))
    if not folders:
        raise InvalidArgument(f"{out} has no rendered host; name the --out of forge deploy render")
    return {
        file.parent.name: read_manifest(file.read_bytes(), source=str(file)) for file in folders
    }


def rendered_inventory(out: Path) -> Inventory:
    """Return the inventory of the last render. Raises `InvalidArgument`."""
    file = out / INVENTORY
    try:
        text = file.read_text()
    except OSError as error:
        raise InvalidArgument(
            f"{file}: {error.strerror}; name the --out of forge deploy render"
        ) from None
    (release, *_) = {one.release for one in rendered_hosts(out).values()}
    return read_inventory(text, source=str(file), release=release)


def private_folder(folder: Path) -> None:
    """Make a directory for its owner alone, if it is absent. Raises `InvalidArgument`."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.name == HOSTS:
            folder.chmod(0o700)
    except OSError as error:
        raise InvalidArgument(f"{folder}: {error.strerror}") from None


def _write_host(hosts: Path, rendered: RenderedHost) -> list[str]:
    """Write one host; return the paths that changed. The manifest is last."""
    folder = hosts / rendered.manifest.host
    root = folder / TREE
    root.mkdir(parents=True, exist_ok=True)
    changed = []
    expected = set()
    for one in rendered.files:
        path = root / one.path.lstrip("/")
        expected.add(path)
        if _write(path, one.content, one.mode):
            changed.append(one.path)
    for path in sorted(root.rglob("*")):
        if path.is_file() and path not in expected:
            path.unlink()
            changed.append(f"/{path.relative_to(root)}")
    if _write(folder / MANIFEST, manifest_text(rendered.manifest), SECRET) and not changed:
        changed.append(MANIFEST)
    return changed


def _write(path: Path, content: bytes, mode: int) -> bool:
    """Write a file at once; return False for one that has this content and mode already."""
    if path.is_file() and path.read_bytes() == content and path.stat().st_mode & 0o777 == mode:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    with errors_named(path):
        unfinished.write_bytes(content)
    unfinished.chmod(mode)
    unfinished.replace(path)
    return True


def _twice(rendered: RenderedHost) -> Iterator[str]:
    """Yield a line for each port that two units of a host have."""
    owners: dict[int, str] = {}
    for unit in rendered.manifest.units:
        for port in unit.ports.values():
            if (owner := owners.setdefault(port, unit.name)) != unit.name:
                host = rendered.manifest.host
                yield (
                    f"hosts.{host}: {owner} and {unit.name} have the port {port}; "
                    "set another one of one instance in [hosts.NAME.env.INSTANCE] (FORGE_PORT, "
                    "FORGE_METRICS_PORT, FORGE_HTTP__PORT)"
                )


def _feed_faults(inventory: Inventory) -> Iterator[str]:
    """Yield a line for each feed with an option that `forge queue submit` refuses."""
    commands: Any = typer.main.get_command(queue_app)
    submit = commands.commands["submit"]
    for host in inventory.hosts:
        for one in (each for each in host.instances if each.kind == "feed"):
            words = host.env.get(env_name(one), {}).get("FORGE_FEED", "")
            try:
                submit.make_context("forge queue submit", ["FILE", *shlex.split(words)])
            except (USAGE_ERROR, ValueError) as error:
                usage = isinstance(error, USAGE_ERROR)
                said = usage_error(error, "forge queue submit") if usage else error
                key = f"hosts.{host.name}.env.{env_name(one)}.FORGE_FEED"
                yield f"{key} = {words!r} is not allowed: {said}"


def _check_settings(
    inventory: Inventory, rendered: list[RenderedHost], folder: Path, source: str
) -> None:
    """Ask each service whether it accepts its file, and each instance its variables; each distinct
    pair once."""
    programs: dict[tuple[bytes, str], Program] = {}
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        for host, made in zip(inventory.hosts, rendered, strict=True):
            for one in made.files:
                name = Path(one.path).name
                service = name.removesuffix(".toml")
                if one.path != f"/etc/forge/{name}" or service not in MODULES or name == service:
                    continue
                # Hosts differ in their address, which a service cannot refuse.
                content = one.content.replace(host.address.encode(), b"ADDRESS")
                file = folder / f"{host.name}-{name}"
                file.write_bytes(one.content)
                for subject, environ in _environs(host, service):
                    programs.setdefault(
                        (content, str(environ)),
                        Program(
                            name=f"{subject} on {host.name}",
                            module=MODULES[service],
                            flags=("--config", str(file)),
                            environ=environ,
                        ),
                    )
        printed = print_settings(list(programs.values()), check=False)
        raise_all([ConfigError(f"{source}: {line}") for line in _faults(printed, folder)])
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _environs(host: Host, service: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield a service without variables, then its instances on a host that have some."""
    yield service, {}
    for one in host.instances:
        own = host.env.get(env_name(one), {})
        if KINDS[one.kind].service == service and any(name.startswith("FORGE_") for name in own):
            yield env_name(one), dict(own)


def _faults(printed: list[PrintedSettings], folder: Path) -> Iterator[str]:
    """Yield a line for each fault; that of a file is not one of each instance, too."""
    seen: set[tuple[str, str]] = set()
    for one in printed:
        for error in one.errors:
            host = one.program.name.rpartition(" ")[2]
            if (host, error) not in seen:
                seen.add((host, error))
                yield f"settings of {one.program.name}: {_without(error, folder)}"


def _without(error: str, folder: Path) -> str:
    """An error without the name of a temporary file."""
    file, colon, rest = error.partition(": ")
    return rest if colon and file.startswith(str(folder)) else error
