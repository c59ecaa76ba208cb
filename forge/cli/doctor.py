"""`forge doctor`: checks of this machine, each with a remedy."""

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
from rich.markup import escape

from forge.agents.control_groups import delegated_group
from forge.agents.process_sandbox import ProcessSandbox
from forge.agents.sandbox import REMEDY as SANDBOX_REMEDY
from forge.agents.sandbox import SANDBOX
from forge.cli.clocks import compare_clocks
from forge.cli.command_exit import say
from forge.cli.connection import Connection
from forge.cli.stack import etcd_binary
from forge.core.clocks import AGREE_S
from forge.core.errors import ForgeError
from forge.core.extras import DISTRIBUTION, missing_packages, requirements
from forge.runtime.coordination import Coordinator
from forge.runtime.process.clock_watch import REMEDY
from forge.runtime.process.host_check import nearest_existing
from forge.runtime.rpc import Channels
from forge.runtime.security.tls import is_loopback_etcd

GIB = 1 << 30
EXTRAS = ("gateway", "pool", "inference", "trainer", "agents")
"""Extras that a run on one machine needs, besides the core and an etcd."""
_TORCH = """
import torch
devices = (torch.cuda.get_device_name(at) for at in range(torch.cuda.device_count()))
print(torch.__version__, *devices, sep=", ")
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of one check."""

    ok: bool
    text: str
    remedy: str = ""
    was_run: bool = True
    """False: the text says why the check was not run."""


def examine(root: Path, *, cluster: Connection | None = None) -> int:
    """Prints all findings, with the clocks of `cluster` if given.

    Returns the exit code: 0 without problems, otherwise 1.
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
        _sandbox,
        _process_sandbox,
        control_groups,
        containers,
    ]
    findings = [check() for check in checks]
    if cluster is not None:
        findings += asyncio.run(_cluster(cluster))
    for finding in findings:
        report(finding)
    return 0 if all(finding.ok for finding in findings) else 1


def report(finding: Finding) -> None:
    """Prints one finding, and its remedy if it is a problem."""
    mark = "[green]ok [/green]" if finding.ok else "[red]BAD[/red]"
    if not finding.was_run:
        mark = "[dim]-- [/dim]"
    say(f"{mark} {escape(finding.text)}")
    if finding.remedy and not finding.ok:
        say(f"    {escape(finding.remedy)}")


async def _cluster(cluster: Connection) -> list[Finding]:
    try:
        async with cluster.open() as (coordinator, channels):
            etcd = _etcd_access(cluster.etcd, demands_login=await coordinator.demands_login())
            return [etcd, *await _clocks(coordinator, channels)]
    except ForgeError as error:
        return [Finding(ok=False, text=f"cluster {cluster.cluster}: {error}")]


def _etcd_access(endpoints: str, *, demands_login: bool) -> Finding:
    """A writer of etcd names the addresses that get tokens, so beyond loopback it is protected."""
    encrypted = "https://" in endpoints
    text = (
        f"etcd at {endpoints}: {'TLS' if encrypted else 'plaintext'}, "
        f"{'' if demands_login else 'no '}authentication"
    )
    return Finding(
        ok=is_loopback_etcd(endpoints) or (encrypted and demands_login),
        text=text,
        remedy="Enable both: certificates by `forge certs`, users and roles by `forge etcd apply`.",
    )


async def _clocks(coordinator: Coordinator, channels: Channels) -> list[Finding]:
    """Returns one finding for each wrong clock, or one for all clocks."""
    services, clocks = await compare_clocks(coordinator, channels)
    if not clocks.off:
        agree = f"clocks of this machine and {services} services agree within {AGREE_S:g} s"
        return [Finding(ok=True, text=agree)]
    remedy = f"On the host of that address, {REMEDY}."
    return [Finding(ok=False, text=line, remedy=remedy) for line in clocks.lines()]


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    return Finding(
        ok=sys.version_info >= (3, 11), text=f"Python {version}", remedy="Use Python 3.11 or newer."
    )


def _packages() -> Finding:
    missing = missing_packages(EXTRAS)
    wrong = {f"{name} is missing" for name in missing}
    for package in requirements(EXTRAS):
        version = "" if package.name in missing else metadata.version(package.name)
        if version and not package.specifier.contains(version, prereleases=True):
            wrong.add(f"{package.name} {version} is not {package.specifier}")
    return Finding(
        ok=not wrong,
        text=f"packages: {', '.join(sorted(wrong))}" if wrong else "packages",
        remedy='Run `make setup`, or install the extra of the service, e.g. "forge-rl[gateway]".',
    )


def _import_names() -> Finding:
    """Two distributions can have one package name; pip keeps the files installed last."""
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
    # In a separate process: the import takes seconds, and a broken torch may crash its process.
    tried = subprocess.run([sys.executable, "-c", _TORCH], capture_output=True, text=True)
    if tried.returncode == 0:
        return Finding(ok=True, text=f"torch {tried.stdout.strip()}")
    reason = tried.stderr.strip().rpartition("\n")[2] or f"exit code {tried.returncode}"
    return Finding(
        ok=False,
        text=f"torch cannot be imported: {reason}",
        remedy="Reinstall it: pip install --force-reinstall --no-deps torch",
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
        return Finding(ok=True, text="127.0.0.1 accepts connections")
    except OSError as error:
        return Finding(ok=False, text=f"127.0.0.1: {error}", remedy="Bring the lo interface up.")


def disk(root: Path) -> Finding:
    """Checks the disk space for a run under `root`."""
    existing = nearest_existing(root.resolve())
    if not (existing.is_dir() and os.access(existing, os.W_OK)):
        return Finding(
            ok=False,
            text=f"{existing} is not a writable directory",
            remedy="Name another directory with --root.",
        )
    free = shutil.disk_usage(existing).free
    return Finding(
        ok=free > 4 * GIB,
        text=f"{free / GIB:.1f} GiB free under {existing}",
        remedy="A run needs about 4 GiB: free some, or name another directory with --root.",
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


def _sandbox() -> Finding:
    problem, _, remedy = asyncio.run(SANDBOX.problem()).partition("; ")
    return Finding(
        ok=not problem,
        text=problem or "sandbox for programs of models: bubblewrap, allow-list of system calls",
        remedy=f"To do: {remedy}.",
    )


def _process_sandbox() -> Finding:
    box = asyncio.run(ProcessSandbox(tmp_bytes=1 << 20).fitted())
    problem = asyncio.run(box.problem())
    proc = "a private" if box.proc else "no"
    return Finding(
        ok=not problem,
        text=f"no sandbox for commands and reward functions: {problem}"
        if problem
        else "sandbox for commands and reward functions: bubblewrap, deny-list of system calls, "
        f"{proc} /proc",
        remedy=f"To do: {SANDBOX_REMEDY}.",
    )


def control_groups() -> Finding:
    """Tells whether sandboxes of a runner started here have groups; a unit may have them."""
    try:
        text = f"control groups of sandboxes: {delegated_group()} is delegated"
    except ForgeError as error:
        text = f"no control groups for sandboxes, resource limits instead: {error}"
    return Finding(ok=True, text=text)


def containers() -> Finding:
    """Tells the container engine; only command_sandbox = container needs one."""
    for engine in ("podman", "docker"):
        if shutil.which(engine) is None:
            continue
        tried = subprocess.run([engine, "version"], capture_output=True, text=True)
        if tried.returncode == 0:
            return Finding(ok=True, text=f"containers for commands: {engine}")
        reason = (tried.stderr.strip() or f"exit code {tried.returncode}").splitlines()[-1]
        return Finding(ok=True, text=f"no containers for commands: {engine} version: {reason}")
    return Finding(ok=True, text="no containers for commands: neither podman nor docker")
