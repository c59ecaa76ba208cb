"""`forge doctor --settings DIRECTORY`: the settings of this host's services, held against the host.

Owns ports and data directories; `certificate_doctor` owns the certificates, and `--check` of each
service its own rules.
"""

from __future__ import annotations

import errno
import os
import shutil
import socket
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from forge.cli.certificate_doctor import CertificateFiles, certificate_findings
from forge.cli.finding import Finding
from forge.cli.service_settings import NO_END, PrintedSettings
from forge.runtime.process.host_check import nearest_existing
from forge.runtime.process.service import EVERY_ADDRESS
from forge.runtime.security.tls import is_loopback

GIB = 1 << 30
NEEDED_BYTES = 4 * GIB
SLOW_FSYNC_S = 0.2
"""The pool acknowledges after an fsync; a disk needs a hundredth of this."""
_PORT_KEYS = ("port", "metrics_port", "http.port", "bulk.port")
_DATA_KEYS = ("data_dir", "checkpoint.dir", "kv.store_dir")
_IN_MEMORY = ("tmpfs", "ramfs")
_TAKEN = "already in use on"
"""In lines of `--check`: a service of this host may be the user of its own port."""


def settings_findings(printed: Sequence[PrintedSettings]) -> Iterator[Finding]:
    """Yields the findings about all services."""
    for one in printed:
        errors = [error for error in one.errors if _TAKEN not in error]
        source = one.program.source
        for error in errors:
            remedy = (
                "This host or one of its disks is busy: repeat the command under less load."
                if error.startswith(NO_END)
                else f"Correct it in {source}; the settings: python -m {one.program.module} --help"
            )
            yield Finding(ok=False, text=f"{one.program.name}: {error}", remedy=remedy)
        if not errors:
            yield Finding(ok=True, text=f"settings of {one.program.name}")
    read = [one for one in printed if one.text]
    yield from _ports(read)
    yield from _certificates(read)
    yield from _data_directories(read)


def _ports(printed: Sequence[PrintedSettings]) -> Iterator[Finding]:
    users: dict[int, list[tuple[str, PrintedSettings]]] = defaultdict(list)
    for one in printed:
        for key in _PORT_KEYS:
            if port := one.value(key):
                users[int(port)].append((f"{key} of {one.program.name}", one))
    free = []
    for port, named in sorted(users.items()):
        names = " and ".join(name for name, _ in named)
        source = named[-1][1].program.source
        if len(named) > 1:
            remedy = f"Set another one in {source}, or 0 for any free one."
            yield Finding(ok=False, text=f"port {port} is {names}", remedy=remedy)
        elif (found := _user_of_port(port, names, named[0][1])) is not None:
            yield found
        else:
            free.append(port)
    if free:
        yield Finding(ok=True, text=f"ports {', '.join(map(str, free))}: free, or their service's")


def _user_of_port(port: int, name: str, one: PrintedSettings) -> Finding | None:
    """Returns None for a free port, and for one of the service itself."""
    host = str(one.value("host")).strip("[]")
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            return None
        except OSError as error:
            reason, taken = (error.strerror or str(error)).lower(), error.errno == errno.EADDRINUSE
    text = f"port {port} ({name}) on {host}: {reason}"
    if not taken:
        remedy = f"Set a host of this machine, and a port, in {one.program.source}."
        return Finding(ok=False, text=text, remedy=remedy)
    user = _listener(port)
    if user is None:
        seen_by_root = f"{text}; only root sees by which process"
        return Finding(ok=True, was_run=False, text=seen_by_root)
    if one.program.module in user.cmdline():
        return None
    return Finding(
        ok=False,
        text=f"{text} by {user.name()}, process {user.pid}",
        remedy=f"Stop that process, or set another port in {one.program.source}.",
    )


def _listener(port: int) -> psutil.Process | None:
    """Returns the process that listens on a port, if this user may see it."""
    try:
        for one in psutil.net_connections("tcp"):
            if (
                one.status == psutil.CONN_LISTEN
                and one.laddr
                and one.laddr.port == port
                and one.pid
            ):
                return psutil.Process(one.pid)
    except psutil.Error:
        pass
    return None


def _certificates(printed: Sequence[PrintedSettings]) -> Iterator[Finding]:
    files: dict[CertificateFiles, set[str]] = defaultdict(set)
    for one in printed:
        named = [str(one.value(key)) for key in ("tls_cert", "tls_key", "tls_ca")]
        host = str(one.value("advertise_host") or one.value("host"))
        if named[0]:
            files[CertificateFiles(*named)] |= set() if host in EVERY_ADDRESS else {host}
    for pair, hosts in files.items():
        yield from certificate_findings(pair, hosts, now_unix_s=time.time())
    plain = [
        one.program.name
        for one in printed
        if not one.value("tls_cert") and not is_loopback(str(one.value("host")))
    ]
    if plain:
        yield Finding(
            ok=False,
            text=f"no TLS beyond loopback: {', '.join(plain)}",
            remedy="Make certificates by `forge certs`, and set tls_cert, tls_key and tls_ca.",
        )


def _data_directories(printed: Sequence[PrintedSettings]) -> Iterator[Finding]:
    shown = set()
    for one in printed:
        for key in _DATA_KEYS:
            path = str(one.value(key))
            if path and path not in shown:
                shown.add(path)
                yield disk(Path(path), remedy=f"set {key} of {one.program.name} to another one")


def disk(path: Path, *, remedy: str) -> Finding:
    """Checks space, kind and fsync of the disk under `path`, by a small file that it removes.
    `remedy`: how to choose another directory."""
    existing = nearest_existing(path.resolve())
    if not (existing.is_dir() and os.access(existing, os.W_OK)):
        text = f"{existing} is not a writable directory of this user"
        return Finding(ok=False, text=text, remedy=f"Run as its owner, or {remedy}.")
    kind, free = _kind(existing), shutil.disk_usage(existing).free
    try:
        fsync_s = _fsync_s(existing)
    except OSError as error:
        text = f"{existing} takes no file: {error.strerror}"
        return Finding(ok=False, text=text, remedy=f"Free some space, or {remedy}.")
    if kind in _IN_MEMORY:
        lost = f"{existing} is in memory ({kind}) and lost at a reboot"
        return Finding(ok=False, text=lost, remedy=f"Mount a disk there, or {remedy}.")
    text = f"{free / GIB:.1f} GiB free under {existing} ({kind}), fsync {fsync_s * 1000:.1f} ms"
    if free <= NEEDED_BYTES:
        space = f"It needs about 4 GiB: free some, or {remedy}."
        return Finding(ok=False, text=text, remedy=space)
    slow = f"The disk is slow or busy: find its other users (iostat -x), or {remedy}."
    return Finding(ok=fsync_s < SLOW_FSYNC_S, text=text, remedy=slow)


def _kind(path: Path) -> str:
    """Returns the type of the file system, such as ext4."""
    mounts = {
        Path(one.mountpoint): one.fstype
        for one in psutil.disk_partitions(all=True)
        if path.is_relative_to(one.mountpoint)
    }
    return mounts[max(mounts, key=lambda mount: len(mount.parts))] if mounts else "unknown"


def _fsync_s(directory: Path) -> float:
    """Returns the median time of five fsyncs of a page."""
    times = []
    with tempfile.TemporaryFile(dir=directory) as file:
        for _ in range(5):
            file.write(os.urandom(4096))
            file.flush()
            started_s = time.perf_counter()
            os.fsync(file.fileno())
            times.append(time.perf_counter() - started_s)
    return statistics.median(times)
