"""The command `forge support-bundle`: its sources from its options, and its output."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from forge.cli.command_exit import say
from forge.cli.connection import Connection, newest_run_directory
from forge.cli.doctor.support_bundle import Sources, collect_bundle
from forge.cli.options import SystemOptions
from forge.core.errors import ForgeError


async def make_bundle(system: SystemOptions, *, settings: Path | None, out: Path | None) -> None:
    """Writes the archive, and prints its manifest and path. Raises `InvalidArgument`."""
    bundle = await collect_bundle(_sources(system, settings))
    path = out or Path(f"forge-support-{datetime.now(UTC):%Y%m%d-%H%M%S}.tar.gz")
    bundle.write(path)
    say(bundle.manifest().rstrip("\n"))
    say(f"{path}: look through it before you send it.")


def _sources(system: SystemOptions, settings: Path | None) -> Sources:
    run = None
    try:
        if not system.etcd:
            run = system.run_dir or newest_run_directory(system.root)
    except ForgeError:
        # The system then has the same error.
        pass
    found: Connection | ForgeError
    try:
        found = system.resolved()
    except ForgeError as error:
        found = error
    return Sources(root=system.root, system=found, run=run, settings=settings)
