"""`forge doctor`: checks that say what is wrong with this machine and what to do about it."""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import psutil
from packaging.requirements import Requirement
from rich.console import Console
from rich.markup import escape

from forge.cli.clocks import compare_clocks
from forge.cli.connection import Connection
from forge.cli.stack import etcd_binary
from forge.core.clocks import AGREE_S
from forge.core.errors import ForgeError
from forge.runtime.clock_watch import REMEDY

DISTRIBUTION = "forge-rl"
GIB = 1 << 30
EXTRAS = ("gateway", "pool", "inference", "trainer", "agents")
"""What a run on one machine needs besides the core and an etcd."""
_TORCH = """
import torch
devices = (torch.cuda.get_device_name(at) for at in range(torch.cuda.device_count()))
print(torch.__version__, *devices, sep=", ")
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What one check found."""

    ok: bool
    text: str
    remedy: str = ""


def examine(root: Path, console: Console, *, cluster: Connection | None = None) -> int:
    """Print every finding, of the clocks of `cluster` as well.

    Returns the exit code: 0 when all is well, 1 otherwise.
    """
    checks: list[Callable[[], Finding]] = [
        _python,
        _packages,
        _import_names,
        _torch,
        _etcd,
        _loopback,
        lambda: disk(root),
        _memory,
        _files,
    ]
    findings = [check() for check in checks]
    if cluster is not None:
        findings += asyncio.run(_clocks(cluster))
    for finding in findings:
        mark = "[green]ok [/green]" if finding.ok else "[red]BAD[/red]"
        console.print(f"{mark} {escape(finding.text)}", highlight=False, soft_wrap=True)
        if finding.remedy and not finding.ok:
            console.print(f"    {escape(finding.remedy)}", highlight=False, soft_wrap=True)
    return 0 if all(finding.ok for finding in findings) else 1


async def _clocks(cluster: Connection) -> list[Finding]:
    """One for each clock that is off, or one for all."""
    try:
        async with cluster.open() as (coordinator, channels):
            services, found = await compare_clocks(coordinator, channels)
    except ForgeError as error:
        return [Finding(ok=False, text=f"cluster {cluster.cluster}: {error}")]
    if not found.off:
        agree = f"clocks of this machine and {services} services agree within {AGREE_S:g} s"
        return [Finding(ok=True, text=agree)]
    remedy = f"On the host of that address, {REMEDY}."
    return [Finding(ok=False, text=line, remedy=remedy) for line in found.lines()]


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    return Finding(
        ok=sys.version_info >= (3, 11), text=f"Python {version}", remedy="Use Python 3.11 or newer."
    )


def _packages() -> Finding:
    wrong = set()
    for one in map(Requirement, metadata.requires(DISTRIBUTION) or ()):
        if one.marker and not any(one.marker.evaluate({"extra": extra}) for extra in EXTRAS):
            continue
        try:
            found = metadata.version(one.name)
        except metadata.PackageNotFoundError:
            wrong.add(f"{one.name} is missing")
        else:
            if not one.specifier.contains(found, prereleases=True):
                wrong.add(f"{one.name} {found} is not {one.specifier}")
    return Finding(
        ok=not wrong,
        text=f"packages: {', '.join(sorted(wrong))}" if wrong else "packages",
        remedy='Run `make setup`, or install the extra of the service, e.g. "forge-rl[gateway]".',
    )


def _import_names() -> Finding:
    """pip lets two distributions write files of one package; the later one wins, file by file."""
    owners = metadata.packages_distributions()
    others = {
        f"{owner} {metadata.version(owner)} has a package {name} too"
        for name in ("forge", "services")
        for owner in owners.get(name, ())
        if owner != DISTRIBUTION
    }
    return Finding(
        ok=not others,
        text=", ".join(sorted(others)) or f"{DISTRIBUTION} {metadata.version(DISTRIBUTION)}",
        remedy=f"Uninstall it, then: pip install --force-reinstall --no-deps {DISTRIBUTION}",
    )


def _torch() -> Finding:
    # In a process of its own: it takes seconds and a broken one may take the process along.
    tried = subprocess.run([sys.executable, "-c", _TORCH], capture_output=True, text=True)
    if tried.returncode == 0:
        return Finding(ok=True, text=f"torch {tried.stdout.strip()}")
    why = tried.stderr.strip().rpartition("\n")[2] or f"exit code {tried.returncode}"
    return Finding(
        ok=False,
        text=f"torch cannot be imported: {why}",
        remedy="Install it anew: pip install --force-reinstall --no-deps torch",
    )


def _etcd() -> Finding:
    try:
        return Finding(ok=True, text=f"etcd at {etcd_binary()}")
    except ForgeError as error:
        return Finding(ok=False, text="etcd", remedy=str(error))


def _loopback() -> Finding:
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
        return Finding(ok=True, text="127.0.0.1 takes connections")
    except OSError as error:
        return Finding(ok=False, text=f"127.0.0.1: {error}", remedy="Bring the lo interface up.")


def disk(root: Path) -> Finding:
    """Whether a run under `root` has room for what it writes."""
    existing = next(p for p in (root.resolve(), *root.resolve().parents) if p.exists())
    if not (existing.is_dir() and os.access(existing, os.W_OK)):
        return Finding(
            ok=False,
            text=f"{existing} is no directory that can be written to",
            remedy="Name another place with --root.",
        )
    free = shutil.disk_usage(existing).free
    return Finding(
        ok=free > 4 * GIB,
        text=f"{free / GIB:.1f} GiB free under {existing}",
        remedy="A run needs about 4 GiB; free some or name another place with --root.",
    )


def _memory() -> Finding:
    available = psutil.virtual_memory().available
    return Finding(
        ok=available > 4 * GIB,
        text=f"{available / GIB:.0f} GiB of memory available, {psutil.cpu_count()} CPUs",
        remedy="The tiny run needs about 4 GiB, smollm2 about 10.",
    )


def _files() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return Finding(
        ok=soft >= 1024,
        text=f"{soft} open files allowed",
        remedy="Raise it with `ulimit -n 4096`.",
    )
