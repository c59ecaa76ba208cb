"""A host held against its manifest: one finding for each difference, with its remedy. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from forge.cli.deploy.host.file_history import FileHistory, FileVersion
from forge.cli.deploy.inventory.kinds import ETCD, has_data
from forge.cli.deploy.render.rendered import FileEntry, Manifest, UnitEntry
from forge.cli.finding import Finding

INSTALL = "Install it again: forge deploy install"
"""Remedy of what `forge deploy install` writes."""
LINK = "/opt/forge/.venv"
"""The link to the release in use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundFile:
    """A file of the host."""

    sha256: str
    mode: int
    owner: str
    """user:group."""
    changed_unix_s: float
    difference: str = ""
    """First line that differs from the rendered one; empty for secrets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundUnit:
    """A unit as systemd has it."""

    active: str
    """`active`, `inactive`, `failed`, `activating`, ..."""
    enabled: bool
    started_unix_s: float = 0.0
    """0: it does not run."""
    result: str = ""
    """`exit-code`, `timeout`, ...; `success` for a stop."""
    has_ended: bool = False
    """Whether its process ended by itself, with success: a feed after its last epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listener:
    """A process that listens on a port."""

    process: str
    pid: int
    unit: str
    """Empty for a process of no unit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostState:
    """One host at one moment."""

    name: str
    """Without the domain."""
    release: str
    """Target of the link /opt/forge/.venv; empty: none."""
    version: str
    """Version of Forge there; empty: none is installed."""
    linked_unix_s: float
    """Time of the last change of the link."""
    files: Mapping[str, FoundFile]
    users: frozenset[str]
    units: Mapping[str, FoundUnit]
    other_units: tuple[str, ...]
    """Units of Forge that run or are enabled, and that the manifest does not name."""
    listeners: Mapping[int, Listener]
    has_model: bool
    absent_data: tuple[str, ...]
    """Files of the manifest's data that the host lacks."""
    starts_at_boot: bool
    """Whether forge.target is enabled."""
    owner: str = "root:root"
    """The expected owner of all files."""
    changes: FileHistory = field(default_factory=FileHistory)

    def contents(self) -> dict[str, FileVersion]:
        """Return the present contents of files by path, the link of the release among them."""
        found = {
            path: FileVersion(unix_s=one.changed_unix_s, digest=one.sha256)
            for path, one in self.files.items()
        }
        if self.release:
            found[LINK] = FileVersion(unix_s=self.linked_unix_s, digest=self.release)
        return found


def differences(manifest: Manifest, state: HostState) -> list[Finding]:
    """Return a finding for each difference, or one for each subject without any."""
    found = []
    for subject, problems in (
        (f"host {manifest.host}", _host(manifest, state)),
        (f"forge {manifest.release}", _release(manifest, state)),
        (f"{len(manifest.files)} files", _files(manifest, state)),
        (f"{len(manifest.units)} units", _units(manifest, state)),
        ("ports", _ports(manifest, state)),
    ):
        listed = list(problems)
        found += listed or [Finding(ok=True, text=subject)]
    return found


def stale_since(unit: UnitEntry, state: HostState) -> str:
    """Return a file that differs from its content at the start of a running unit; "" for none."""
    started_unix_s = state.units[unit.name].started_unix_s
    if not started_unix_s:
        return ""
    present = state.contents()
    paths = {*unit.inputs, *state.changes.inputs.get(unit.name, ())}
    if unit.kind != ETCD and not unit.is_timer:
        paths.add(LINK)
    differing = (
        path
        for path in paths
        if state.changes.differs(path, present.get(path), since_unix_s=started_unix_s)
    )
    return min(differing, default="")


def _bad(text: str, remedy: str) -> Finding:
    return Finding(ok=False, text=text, remedy=remedy)


def _host(manifest: Manifest, state: HostState) -> Iterator[Finding]:
    if state.name != manifest.host:
        yield _bad(
            f"this host is {state.name}, and the files are those of {manifest.host}",
            f"hostnamectl set-hostname {manifest.host}, or install the files of {state.name}: "
            "ids of instances have the name.",
        )
    for user in manifest.users:
        if user not in state.users:
            yield _bad(f"user {user} is missing", "systemd-sysusers forge.conf")
    if manifest.model and not state.has_model:
        yield _bad(
            f"model directory {manifest.model} is missing or has no config.json",
            "Copy the starting weights to it: docs/deploy.md has the command.",
        )
    for path in state.absent_data:
        remedy = f"Bring it, then: chown root:forge-feed {path} && chmod 0640 {path}"
        yield _bad(f"{path} is missing", remedy)


def _release(manifest: Manifest, state: HostState) -> Iterator[Finding]:
    if not state.release:
        yield _bad(f"{LINK} leads to no installation", f"{INSTALL}, after pip install of Forge.")
    elif state.release != manifest.release:
        yield _bad(
            f"{LINK} leads to {state.release}, not to {manifest.release}",
            "Finish the upgrade: forge deploy upgrade, on the computer that renders.",
        )
    elif not state.version:
        yield _bad(
            f"/opt/forge/{state.release} has no forge",
            f"/opt/forge/{state.release}/bin/pip install it, as docs/deploy.md shows.",
        )
    elif state.version != manifest.release:
        yield _bad(
            f"/opt/forge/{state.release} has forge {state.version}",
            f"Install {manifest.release} in it.",
        )


def _files(manifest: Manifest, state: HostState) -> Iterator[Finding]:
    for entry in manifest.files:
        found = state.files.get(entry.path)
        if found is None:
            kind = "unit" if entry.path.endswith((".service", ".target", ".timer")) else "file"
            yield _bad(f"{kind} {entry.path} is missing", f"{INSTALL}.")
        else:
            yield from _file(entry, found, state.owner)


def _file(entry: FileEntry, found: FoundFile, owner: str) -> Iterator[Finding]:
    if found.sha256 != entry.sha256:
        detail = f": {found.difference}" if found.difference else ""
        yield _bad(
            f"file {entry.path} differs{detail}",
            f"{INSTALL}. To keep the change, put it into the inventory.",
        )
    if found.owner != owner:
        remedy = f"chown {owner} {entry.path}"
        yield _bad(f"{entry.path} belongs to {found.owner}, not to {owner}", remedy)
    if found.mode != entry.mode:
        remedy = f"chmod {entry.mode:04o} {entry.path}"
        yield _bad(f"{entry.path} has mode {found.mode:04o}, not {entry.mode:04o}", remedy)


def _units(manifest: Manifest, state: HostState) -> Iterator[Finding]:
    for unit in manifest.units:
        found = state.units[unit.name]
        if not found.enabled:
            yield _bad(f"{unit.name} is not enabled", f"systemctl enable {unit.name}")
        if found.active != "active" and not found.has_ended:
            result = f" ({found.result})" if found.result not in ("", "success") else ""
            yield _bad(
                f"{unit.name} is {found.active}{result}",
                f"systemctl restart {unit.name}; its reason: journalctl -u {unit.name} -n 20",
            )
        if changed := stale_since(unit, state):
            remedy = f"systemctl restart {unit.name}, or forge deploy apply for one after another."
            yield _bad(f"{unit.name} runs since before the change of {changed}", remedy)
        if unit.is_timer and (started := state.units[unit.service]).active == "failed":
            remedy = f"journalctl -u {unit.service} -n 20; then: systemctl start {unit.service}"
            yield _bad(f"the last run of {unit.service} failed ({started.result})", remedy)
    if not state.starts_at_boot:
        remedy = "systemctl enable forge.target"
        yield _bad("forge.target is not enabled: a reboot starts no unit", remedy)
    for name in state.other_units:
        is_pool = has_data(name) and name.startswith("forge-pool")
        first = "Move its groups first: forge pool retire. Then: " * is_pool
        yield _bad(f"{name} is not in the inventory", f"{first}systemctl disable --now {name}")


def _ports(manifest: Manifest, state: HostState) -> Iterator[Finding]:
    for unit in manifest.units:
        for purpose, port in unit.ports.items():
            user = state.listeners.get(port)
            if user is not None and user.unit != unit.name:
                of = f" of {user.unit}" if user.unit else ""
                yield _bad(
                    f"port {port} ({purpose} of {unit.name}) is taken by {user.process}, process "
                    f"{user.pid}{of}",
                    "Stop that process, or set another port in the inventory: [hosts."
                    f"{manifest.host}.env], FORGE_PORT, FORGE_METRICS_PORT or FORGE_HTTP__PORT.",
                )
