"""`forge doctor`: checks that say what is wrong with this machine and what to do about it."""

from __future__ import annotations

import importlib.util
import os
import resource
import shutil
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
from rich.console import Console
from rich.markup import escape

from forge.cli.stack import etcd_binary
from forge.core.errors import ForgeError

GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What one check found."""

    ok: bool
    text: str
    remedy: str = ""


def examine(root: Path, console: Console) -> int:
    """Print every finding. Returns the exit code: 0 when all is well, 1 otherwise."""
    checks: list[Callable[[], Finding]] = [
        _python,
        _packages,
        _etcd,
        _loopback,
        lambda: _disk(root),
        _memory,
        _files,
    ]
    findings = [check() for check in checks]
    for finding in findings:
        mark = "[green]ok [/green]" if finding.ok else "[red]BAD[/red]"
        console.print(f"{mark} {escape(finding.text)}", highlight=False, soft_wrap=True)
        if finding.remedy and not finding.ok:
            console.print(f"    {escape(finding.remedy)}", highlight=False, soft_wrap=True)
    return 0 if all(finding.ok for finding in findings) else 1


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    return Finding(
        ok=sys.version_info >= (3, 11), text=f"Python {version}", remedy="Use Python 3.11 or newer."
    )


def _packages() -> Finding:
    needed = ("grpc", "etcd3aio", "lmdb", "torch", "transformers", "tokenizers", "openai")
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    return Finding(
        ok=not missing,
        text="packages" if not missing else f"packages missing: {', '.join(missing)}",
        remedy='Run `make setup`, or install the extra of the service, e.g. "forge-rl[gateway]".',
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


def _disk(root: Path) -> Finding:
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
        text=f"{free / GIB:.0f} GiB free under {existing}",
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
