"""`forge doctor`: checks of this machine, each with a remedy."""

from __future__ import annotations

import asyncio
import re
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from importlib import metadata
from pathlib import Path

import psutil

from forge.agents.sandbox.bubblewrap import remedy as sandbox_remedy
from forge.agents.sandbox.control_groups import delegated_group
from forge.agents.sandbox.process_sandbox import ProcessSandbox
from forge.agents.sandbox.program_sandbox import SANDBOX
from forge.cli.connection import Connection
from forge.cli.doctor.cluster_doctor import cluster_findings
from forge.cli.finding import Finding, findings_of
from forge.cli.local_run.stack import etcd_binary
from forge.cli.service_settings import print_settings, programs_in
from forge.cli.settings_doctor import GIB, disk, settings_findings
from forge.core.errors import ForgeError, first_line
from forge.core.extras import DISTRIBUTION, missing_packages, requirements

EXTRAS = ("gateway", "pool", "inference", "trainer", "agents")
"""Extras that a run on one machine needs, besides the core and an etcd."""
INSTALL = (
    f"Run `make setup`, or pip install '{DISTRIBUTION}[all]'; the host of one service needs its "
    f"extra alone, e.g. '{DISTRIBUTION}[gateway]'."
)
_COMPLETE = "Give this process a complete /dev, /proc and /sys, and the right to fork."
_OF_HOST = re.compile(r"(?<![\w.-])/(dev|proc|sys)/")
_GATEWAY = "services.gateway"
_DRIVER = Path("/proc/driver/nvidia/version")
_TORCH = """
import torch
devices = (torch.cuda.get_device_name(at) for at in range(torch.cuda.device_count()))
print(torch.__version__, *devices, sep=", ")
"""


def examine(
    root: Path,
    *,
    cluster: Connection | None = None,
    settings: Path | None = None,
    model: Path | None = None,
) -> Iterator[Finding]:
    """Yields all findings about this machine; with `settings` also about its services, with `model`
    about a chat template, with `cluster` about etcd and clocks. Raises `InvalidArgument` for a
    directory without settings."""
    programs = programs_in(settings) if settings else []
    checks: dict[str, Callable[[], Finding]] = {
        "Python": _python,
        "packages": _packages,
        "import names": _import_names,
        "torch": _torch,
        "etcd": _etcd,
        "127.0.0.1": _loopback,
        f"disk of {root}": lambda: disk(root, remedy="name another directory with --root"),
        "memory": _memory,
        "open files": _files,
        "file sizes": _file_sizes,
        "sandbox for programs of models": _sandbox,
        "sandbox for commands and reward functions": _process_sandbox,
        "control groups of sandboxes": control_groups,
        "containers for commands": containers,
    }
    for subject, check in checks.items():
        yield from attempted(subject, check)
    printed = print_settings(programs, check=True)
    yield from attempted("settings", lambda: settings_findings(printed))
    models = {str(model)} if model else set()
    models |= {str(one.value("model_path")) for one in printed if one.program.module == _GATEWAY}
    for path in sorted(models - {""}):
        yield from template_findings(path)
    if cluster is not None:
        yield from attempted(
            f"cluster {cluster.cluster}", lambda: asyncio.run(cluster_findings(cluster))
        )


def attempted(subject: str, check: Callable[[], Finding | Iterable[Finding]]) -> Iterator[Finding]:
    """Yields what a check finds, and a problem if it fails itself: the others are wanted."""
    try:
        found = check()
        yield from [found] if isinstance(found, Finding) else found
    # /dev, /proc or /sys may lack anything, in a container above all.
    except Exception as error:
        reason = first_line(error) or type(error).__name__
        yield Finding(
            ok=False,
            text=f"{subject}: the check failed: {reason}",
            remedy=_COMPLETE,
        )


def template_findings(model: str) -> Iterator[Finding]:
    """Yields the findings about a model's chat template, from a program of its own: the gateway
    alone imports transformers."""
    command = [sys.executable, "-m", "services.gateway.model.doctor", model]
    return findings_of(command, remedy=INSTALL)


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
        remedy=INSTALL,
    )


def _import_names() -> Finding:
    """Two distributions can have one package name; pip keeps the files installed last."""
    others = {
        f"{one.name} {one.version} has a package {name} too"
        for one in metadata.distributions()
        for name in ("forge", "services")
        if _has_package(one, name) and one.name != DISTRIBUTION
    }
    return Finding(
        ok=not others,
        text=", ".join(sorted(others)) or f"{DISTRIBUTION} {metadata.version(DISTRIBUTION)}",
        remedy=f"Uninstall it, then: pip install --force-reinstall --no-deps {DISTRIBUTION}",
    )


def _has_package(distribution: metadata.Distribution, name: str) -> bool:
    """By its own list, or its files; `packages_distributions` takes half a second for all names."""
    listed = distribution.read_text("top_level.txt")
    if listed:
        return name in listed.split()
    return f"\n{name}/" in "\n" + (distribution.read_text("RECORD") or "")


def _torch() -> Finding:
    if "torch" in missing_packages(["trainer"]):
        return Finding(ok=False, text="torch is not installed", remedy=INSTALL)
    # In a separate process: the import takes seconds, and a broken torch may crash its process.
    tried = subprocess.run([sys.executable, "-c", _TORCH], capture_output=True, text=True)
    if tried.returncode:
        reason = tried.stderr.strip().rpartition("\n")[2] or f"exit code {tried.returncode}"
        # torch opens /dev/urandom at its import.
        of_host = _OF_HOST.search(reason) is not None
        again = "Reinstall it: pip install --force-reinstall --no-deps torch"
        return Finding(
            ok=False,
            text=f"torch cannot be imported: {reason}",
            remedy=_COMPLETE if of_host else again,
        )
    version, *gpus = tried.stdout.strip().split(", ")
    driver = _DRIVER.exists()
    return Finding(
        ok=bool(gpus) or not driver,
        text=f"torch {version}, {', '.join(gpus) or 'no GPU'}"
        + ("" if gpus or not driver else f", although {_DRIVER} exists"),
        remedy="Install a torch built for this driver, and check CUDA_VISIBLE_DEVICES.",
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


def _memory() -> Finding:
    available = psutil.virtual_memory().available
    return Finding(
        ok=available > 4 * GIB,
        text=f"{available / GIB:.0f} GiB of memory available, {psutil.cpu_count()} CPUs",
        remedy="The tiny run needs about 4 GiB, smollm2 about 10.",
    )


def _files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    remedy = "Raise it with `ulimit -n 4096`."
    if 0 <= hard < 4096:
        remedy = _by_root(hard, "nofile")
    return Finding(ok=soft >= 1024, text=f"{soft} open files allowed", remedy=remedy)


def _file_sizes() -> Finding:
    """Weights, checkpoints, hand-offs and pools are large files, most of them in memory."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if soft < 0:
        return Finding(ok=True, text="files of any size allowed")
    remedy = "Raise it with `ulimit -f unlimited`." if hard < 0 else _by_root(hard, "fsize")
    return Finding(ok=False, text=f"files are limited to {soft / GIB:.3g} GiB", remedy=remedy)


def _by_root(hard: int, name: str) -> str:
    return (
        f"Only root raises the hard limit of {hard}: {name} in /etc/security/limits.conf, "
        f"Limit{name.upper()} of a unit, --ulimit of a container."
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
        remedy=f"To do: {sandbox_remedy()}.",
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
