"""`forge targets`: where Prometheus finds the metrics of every process.

Owns the form of Prometheus' file_sd. The directory in etcd has the addresses, so that
processes on free ports and those started later are found.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from forge.cli.command_exit import say
from forge.cli.connection import Connection
from forge.core.errors import InvalidArgument, Unavailable
from forge.runtime.coordination import Instance
from forge.runtime.telemetry import log


def target_groups(instances: Iterable[Instance], *, cluster: str) -> list[dict[str, Any]]:
    """One group per process, with the labels cluster, service (its kind) and instance."""
    return [
        {
            "targets": [address],
            "labels": {"cluster": cluster, "service": one.kind, "instance": one.instance_id},
        }
        for one in sorted(instances, key=lambda one: (one.kind, one.instance_id))
        if (address := one.metadata.get("metrics", ""))
    ]


async def write_targets(at: Connection, *, file: Path | None, every_s: float | None) -> None:
    """Prints the targets, or keeps `file` up to date every `every_s` seconds; None and 0: read
    once.

    During an outage of etcd the file stays as it is. Raises `Unavailable` at the first reading,
    `InvalidArgument` for a file that cannot be written.
    """
    async with at.open() as (coordinator, _):
        shown = None
        while True:
            try:
                groups = target_groups(await coordinator.all_instances(), cluster=at.cluster)
            except Unavailable as error:
                if shown is None:
                    raise
                log.warning("targets_not_read", error=str(error))
            else:
                text = json.dumps(groups, indent=2)
                if text != shown:
                    _put(text, file)
                shown = text
            if not every_s:
                return
            await asyncio.sleep(every_s)


def _put(text: str, file: Path | None) -> None:
    if file is None:
        say(text)
        return
    # In the same directory, under a name that Prometheus does not read.
    new = file.with_name(f".{file.name}.new")
    try:
        new.write_text(text)
        new.replace(file)
    except OSError as error:
        raise InvalidArgument(f"--file {file}: {error.strerror or error}") from error
