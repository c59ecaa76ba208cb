"""Two versions of the services in one measurement: this checkout and another one."""

from __future__ import annotations

import argparse
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TypeVar

from benchmarks.support.inference.service import Service

OWN, OTHER = "own", "other"
"""The two versions."""
Measured = TypeVar("Measured")


def add_options(parser: argparse.ArgumentParser, *, unit: str) -> None:
    """Adds `--against` and `--rounds`; `unit`: the noun of one round, in the plural."""
    parser.add_argument("--against", type=Path, help="another checkout")
    parser.add_argument("--rounds", type=int, default=9, help=f"measured {unit}, after one more")


def checkouts_of(options: argparse.Namespace) -> dict[str, Path]:
    """Returns the directory of each version."""
    checkouts = {OWN: Path.cwd()}
    if options.against is not None:
        checkouts[OTHER] = options.against.resolve()
    return checkouts


@asynccontextmanager
async def started(
    checkouts: Mapping[str, Path], service_of: Callable[[Path], Service]
) -> AsyncIterator[dict[str, Service]]:
    """Runs a service of each version."""
    async with AsyncExitStack() as undo:
        services = {version: service_of(checkout) for version, checkout in checkouts.items()}
        for service in services.values():
            await service.start()
            undo.push_async_callback(service.stop)
        yield services


def pairs_of(measured: Mapping[str, list[Measured]]) -> list[tuple[Measured, Measured]]:
    """Returns the measurements of both versions in pairs; none without another checkout."""
    return list(zip(measured[OWN], measured[OTHER], strict=True)) if OTHER in measured else []
