"""Reads the state of this host: files, users, units of systemd, listeners."""

from __future__ import annotations

import grp
import pwd
import re
import socket
import subprocess
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from forge.cli.deploy.host import comparison
from forge.cli.deploy.host.comparison import FoundFile, FoundUnit, HostState, Listener
from forge.cli.deploy.host.file_errors import file_error
from forge.cli.deploy.host.file_history import read_file_history
from forge.cli.deploy.inventory.kinds import MAY_END
from forge.cli.deploy.render.rendered import MANIFEST, SECRET, TREE, Manifest, digest, read_manifest
from forge.core.errors import InvalidArgument, Unavailable

DEPLOYED = Path("/etc/forge/deploy")
"""Directory with the manifest and the files of this host, as installed last."""
CHANGES = DEPLOYED.with_name("deploy.changes")
"""The changes of the files that units read."""
LINK = Path(comparison.LINK)
_WANTS = Path("/etc/systemd/system/forge.target.wants")
_OWN_UNITS = ("forge-feed@", "forge-pool-backup@")
"""Units that operators add beside the inventory."""
_UNIT_OF_GROUP = re.compile(r"/(forge-[^/]+\.service)|/([^/]+\.service)")
_VERSION = re.compile(r"forge_rl-(.+)\.dist-info")
_EXITED = "1"
"""CLD_EXITED, as systemd shows the end of a process that was not killed."""
_LIMIT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HostDirectory:
    """The rendered files of one host: manifest.json and root/."""

    folder: Path

    def manifest(self) -> Manifest:
        """Return the manifest. Raises `InvalidArgument`."""
        file = self.folder / MANIFEST
        return read_manifest(self._read(file), source=str(file))

    def manifest_digest(self) -> str:
        """Return the SHA-256 of the manifest. Raises `InvalidArgument`."""
        return digest(self._read(self.folder / MANIFEST))

    def content(self, path: str) -> bytes:
        """Return a rendered file by its path on the host. Raises `InvalidArgument`."""
        return self._read(self.folder / TREE / path.lstrip("/"))

    def _read(self, file: Path) -> bytes:
        try:
            return file.read_bytes()
        except OSError as error:
            raise InvalidArgument(
                f"{file}: {error.strerror}; forge deploy apply copies it to each host"
            ) from None


def systemctl(*words: str, check: bool = True) -> str:
    """Run systemctl; return its output. Raises `Unavailable` with its last line."""
    try:
        ended = subprocess.run(["systemctl", *words], capture_output=True, text=True)
    except OSError as error:
        raise Unavailable(f"systemctl: {error.strerror}") from None
    if ended.returncode and check:
        reason = (ended.stderr or ended.stdout).strip().rpartition("\n")[2]
        raise Unavailable(f"systemctl {' '.join(words)}: {reason}")
    return ended.stdout


def read_host(directory: HostDirectory, manifest: Manifest) -> HostState:
    """Return the state of this host."""
    release = LINK.readlink().name if LINK.is_symlink() and LINK.exists() else ""
    found = {
        entry.path: one
        for entry in manifest.files
        if (one := _file(Path(entry.path), directory, secret=entry.mode == SECRET)) is not None
    }
    names = [one for unit in manifest.units for one in dict.fromkeys((unit.name, unit.service))]
    return HostState(
        name=socket.gethostname().partition(".")[0],
        release=release,
        version=installed_version(LINK),
        linked_unix_s=LINK.lstat().st_mtime if release else 0.0,
        files=found,
        users=frozenset(one.pw_name for one in pwd.getpwall()),
        units=read_units(names),
        other_units=_other_units(names),
        listeners=_listeners(),
        has_model=not manifest.model or (Path(manifest.model) / "config.json").is_file(),
        absent_data=tuple(one for one in manifest.data if not Path(one).is_file()),
        starts_at_boot=systemctl("is-enabled", "forge.target", check=False).strip() == "enabled",
        changes=read_file_history(CHANGES),
    )


def _file(file: Path, directory: HostDirectory, *, secret: bool) -> FoundFile | None:
    try:
        content, status = file.read_bytes(), file.stat()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise file_error(error, file) from None
    return FoundFile(
        sha256=digest(content),
        mode=status.st_mode & 0o7777,
        owner=f"{_user(status.st_uid)}:{_group(status.st_gid)}",
        changed_unix_s=status.st_mtime,
        difference="" if secret else first_difference(content, directory.content(str(file))),
    )


def first_difference(found: bytes, expected: bytes) -> str:
    """Return the first line in which two texts differ; "" for equal ones."""
    if found == expected:
        return ""
    ours = expected.decode(errors="replace").splitlines()
    theirs = found.decode(errors="replace").splitlines()
    pairs = zip(theirs, ours, strict=False)
    number = next((n for n, (one, other) in enumerate(pairs) if one != other), len(theirs))
    number = min(number, len(ours))
    line = theirs[number] if number < len(theirs) else ""
    instead = ours[number] if number < len(ours) else ""
    return f"line {number + 1} is {line!r}, not {instead!r}"


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def _group(number: int) -> str:
    try:
        return grp.getgrgid(number).gr_name
    except KeyError:
        return str(number)


def installed_version(environment: Path) -> str:
    """Return the version of Forge in a Python environment; "" for none."""
    names = [
        path.name for path in environment.glob("lib/python3*/site-packages/forge_rl-*.dist-info")
    ]
    matches = [match[1] for name in names if (match := _VERSION.fullmatch(name))]
    return matches[0] if matches else ""


def read_units(names: Sequence[str]) -> dict[str, FoundUnit]:
    """Return units by name, as systemd has them; also those that it does not know."""
    if not names:
        return {}
    times = ("ExecMainStartTimestampMonotonic", "ActiveEnterTimestampMonotonic")
    ends = ("ExecMainCode", "ExecMainStatus")
    keys = ",".join(("Id", "ActiveState", "UnitFileState", "Result", *times, *ends))
    # The state of a template is that of no instance: the link of the target is.
    enabled = {path.name for path in _WANTS.glob("*")}
    shown = systemctl("show", f"--property={keys}", "--", *names)
    boot_unix_s = time.time() - time.monotonic()
    units = {}
    for block in shown.strip().split("\n\n"):
        row = dict(line.partition("=")[::2] for line in block.splitlines())
        active = row.get("ActiveState", "inactive")
        # A timer has no process.
        started_us = next((int(row[one]) for one in times if row.get(one)), 0)
        units[row.get("Id", "")] = FoundUnit(
            active=active,
            enabled=row.get("Id", "") in enabled,
            started_unix_s=boot_unix_s + started_us / 1e6 if active == "active" else 0.0,
            result=row.get("Result", ""),
            has_ended=active == "inactive"
            and row.get("Id", "").startswith(MAY_END)
            and [row.get(one) for one in ends] == [_EXITED, "0"],
        )
    absent = FoundUnit(active="inactive", enabled=False)
    return {name: units.get(name, absent) for name in names}


def _other_units(names: Collection[str]) -> tuple[str, ...]:
    words = ("list-units", "--plain", "--no-legend", "--state=active,activating,failed")
    listed = systemctl(*words, "forge-*.service", check=False)
    found = {line.split()[0] for line in listed.splitlines() if line.strip()}
    found |= {path.name for path in _WANTS.glob("forge-*.service")}
    return tuple(sorted(one for one in found - set(names) if not one.startswith(_OWN_UNITS)))


def _listeners() -> dict[int, Listener]:
    found = {}
    for one in psutil.net_connections("tcp"):
        if one.status == psutil.CONN_LISTEN and one.laddr and one.pid:
            try:
                name = psutil.Process(one.pid).name()
            except psutil.Error:
                continue
            found[one.laddr.port] = Listener(process=name, pid=one.pid, unit=_unit_of(one.pid))
    return found


def _unit_of(pid: int) -> str:
    """The unit of a process, by its control group."""
    try:
        groups = Path(f"/proc/{pid}/cgroup").read_text()
    except OSError:
        return ""
    match = _UNIT_OF_GROUP.search(groups)
    return (match[1] or match[2]).replace("\\x2d", "-") if match else ""


def clock_is_synchronized() -> bool | None:
    """Return whether NTP keeps the clock, as systemd knows; None without an answer."""
    try:
        ended = subprocess.run(
            ["timedatectl", "show", "--property=NTPSynchronized", "--value"],
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    answer = ended.stdout.strip()
    return answer == "yes" if answer in ("yes", "no") else None
