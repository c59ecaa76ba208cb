"""`forge deploy install`: makes this host what its rendered files say. Repeatable at any point.

Owns files, users, the link of the release and the enabled units. Not here: copies to hosts and the
order of restarts (`roll`).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from forge.cli.deploy.host.comparison import HostState, stale_since
from forge.cli.deploy.host.file_errors import file_error
from forge.cli.deploy.host.file_history import FileHistory, write_file_history
from forge.cli.deploy.host.host import (
    CHANGES,
    DEPLOYED,
    LINK,
    HostDirectory,
    installed_version,
    read_host,
    systemctl,
)
from forge.cli.deploy.inventory.kinds import has_data
from forge.cli.deploy.render.rendered import MANIFEST, FileEntry, Manifest
from forge.core.errors import FailedPrecondition, ForgeError, Unavailable
from forge.runtime.files.sync import errors_named

NEW = DEPLOYED.with_name("deploy.new")
"""A copy that is not installed yet."""
PREVIOUS = DEPLOYED.with_name("deploy.previous")
"""The files of before, for a rollback."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """Changes of an installation, and the units that need a start."""

    changed: list[str]
    """Paths."""
    start: list[str]
    """Units that do not run."""
    restart: list[str]
    """Units that run since before a change."""
    stopped: list[str]
    """Units that left the inventory."""
    kept: list[str]
    """Units that left the inventory and still run: pools, whose data is theirs alone."""


def install(source: Path) -> Installed:
    """Install a directory with a manifest, the running one included. Starts and restarts nothing,
    and stops the units that left the inventory.

    Raises `InvalidArgument`, `FailedPrecondition` for another host or a missing release, and
    `Unavailable` if systemd refuses.
    """
    directory = HostDirectory(folder=source)
    manifest = directory.manifest()
    before = read_host(directory, manifest)
    _require(manifest, before)
    old = _old_manifest()
    try:
        # Before the first write: what a running unit read may be gone after it.
        _note(old or manifest, before)
        changed = [one.path for one in manifest.files if _put(directory, one, before)]
        for path in left_files(old, manifest):
            Path(path).unlink(missing_ok=True)
            changed.append(path)
        if changed or not set(manifest.users) <= before.users:
            _run("systemd-sysusers", "forge.conf")
            _run("systemd-tmpfiles", "--create", *_tmpfiles(manifest))
        if before.release != manifest.release:
            lead_link(LINK, manifest.release)
            changed.append(str(LINK))
    except OSError as error:
        raise file_error(error) from None
    systemctl("daemon-reload")
    systemctl("enable", "--quiet", "forge.target", *(unit.name for unit in manifest.units))
    stopped, kept = _stop_left(old, manifest)
    adopt(source)
    after = _noted(manifest)
    running = [unit for unit in manifest.units if after.units[unit.name].active == "active"]
    ended = [unit for unit in manifest.units if after.units[unit.name].has_ended]
    return Installed(
        changed=changed,
        start=[unit.name for unit in manifest.units if unit not in (*running, *ended)],
        restart=[unit.name for unit in running if stale_since(unit, after)],
        stopped=stopped,
        kept=kept,
    )


def _note(manifest: Manifest, state: HostState) -> FileHistory:
    noted = state.changes.noted(manifest.units, state.contents(), now_unix_s=time.time())
    if noted != state.changes:
        write_file_history(CHANGES, noted)
    return noted


def _noted(manifest: Manifest) -> HostState:
    """Return the state after an installation, with its changes."""
    state = read_host(HostDirectory(folder=DEPLOYED), manifest)
    return replace(state, changes=_note(manifest, state))


def chosen_source(rollback: str) -> Path:
    """Return the directory to install: a complete new copy, or the installed one.

    `rollback`: a release to leave. Where it is installed, the files of before become the new copy;
    elsewhere nothing but an interrupted installation is undone.
    """
    if not rollback:
        return NEW if (NEW / MANIFEST).exists() else DEPLOYED
    current = _old_manifest()
    if current is not None and current.release != rollback:
        _remove_begun(current)
    shutil.rmtree(NEW, ignore_errors=True)
    if (current is None or current.release == rollback) and (PREVIOUS / MANIFEST).exists():
        shutil.copytree(PREVIOUS, NEW)
        return NEW
    return DEPLOYED


def _remove_begun(current: Manifest) -> None:
    """Remove the files that an interrupted installation added."""
    try:
        begun = HostDirectory(folder=NEW).manifest()
    except ForgeError:
        return
    paths = {one.path for one in current.files}
    for one in begun.files:
        if one.path not in paths:
            Path(one.path).unlink(missing_ok=True)


def _require(manifest: Manifest, state: HostState) -> None:
    if state.name != manifest.host:
        raise FailedPrecondition(
            f"this host is {state.name}, and the files are those of {manifest.host}; "
            "set its host name, or correct the inventory"
        )
    if not installed_version(LINK.with_name(manifest.release)):
        raise FailedPrecondition(
            f"/opt/forge/{manifest.release} has no forge; install it as docs/deploy.md shows"
        )


def _old_manifest() -> Manifest | None:
    """The manifest of the last installation, if this release reads it."""
    try:
        return HostDirectory(folder=DEPLOYED).manifest()
    except ForgeError:
        return None


def _put(directory: HostDirectory, entry: FileEntry, state: HostState) -> bool:
    """Write a file that differs, at once; return whether it did."""
    found, path = state.files.get(entry.path), Path(entry.path)
    if found is not None and found.sha256 == entry.sha256:
        if (found.mode, found.owner) == (entry.mode, state.owner):
            return False
        path.chmod(entry.mode)
        shutil.chown(path, 0, 0)
        return True
    path.parent.mkdir(parents=True, exist_ok=True)
    # A unit reads files whose names end as its own do: another ending.
    unfinished = path.with_name(f".{path.name}.forge-new")
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with errors_named(path), os.fdopen(descriptor, "wb") as file:
        file.write(directory.content(entry.path))
        file.flush()
        os.fsync(descriptor)
    unfinished.chmod(entry.mode)
    shutil.chown(unfinished, 0, 0)
    unfinished.replace(path)
    return True


def left_files(old: Manifest | None, manifest: Manifest) -> list[str]:
    """Return the files of the last installation that this one lacks. A unit with data continues,
    and needs its files."""
    if old is None:
        return []
    left = set(left_units(old, manifest))
    kept = {one.path for one in manifest.files}
    for unit in old.units:
        if unit.name in left and has_data(unit.name):
            kept |= {*unit.inputs}
    return [one.path for one in old.files if one.path not in kept]


def left_units(old: Manifest | None, manifest: Manifest) -> list[str]:
    """Return the units of the last installation that this one lacks."""
    names = {unit.name for unit in manifest.units}
    return [unit.name for unit in old.units if unit.name not in names] if old else []


def _stop_left(old: Manifest | None, manifest: Manifest) -> tuple[list[str], list[str]]:
    """Stop what left the inventory; return that, and the units whose data must be moved first."""
    left = left_units(old, manifest)
    stopped = [unit for unit in left if not has_data(unit)]
    if stopped:
        systemctl("disable", "--quiet", "--now", *stopped)
    return stopped, [unit for unit in left if has_data(unit)]


def _tmpfiles(manifest: Manifest) -> Sequence[str]:
    return [
        Path(one.path).name for one in manifest.files if one.path.startswith("/etc/tmpfiles.d/")
    ]


def _run(*command: str) -> None:
    ended = subprocess.run(command, capture_output=True, text=True)
    if ended.returncode:
        reason = ended.stderr.strip().rpartition("\n")[2] or f"exit code {ended.returncode}"
        raise Unavailable(f"{command[0]}: {reason}")


def lead_link(link: Path, release: str) -> None:
    """Lead the link to a release, at once."""
    new = link.with_name(".venv.new")
    new.unlink(missing_ok=True)
    new.symlink_to(release)
    new.replace(link)


def adopt(source: Path) -> None:
    """Replace the installed copy and keep the old one; safe to repeat: without DEPLOYED nothing is
    removed or stopped."""
    if source == DEPLOYED:
        return
    if (source / MANIFEST).read_bytes() == _bytes(DEPLOYED / MANIFEST):
        shutil.rmtree(source)
        return
    if DEPLOYED.exists():
        shutil.rmtree(PREVIOUS, ignore_errors=True)
        DEPLOYED.rename(PREVIOUS)
    source.rename(DEPLOYED)


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""
