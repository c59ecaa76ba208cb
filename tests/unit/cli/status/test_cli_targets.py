"""The list of processes for Prometheus."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from forge.cli.status.targets import write_targets
from forge.core.errors import InvalidArgument
from forge.runtime.coordination import Instance


def instance(kind: str, name: str, **metadata: str) -> Instance:
    return Instance(kind=kind, instance_id=name, address="h:1", metadata=metadata, revision=1)


class Directory:
    """A connection whose etcd has three processes."""

    cluster = "c"

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Any]:
        yield self, None

    async def all_instances(self) -> tuple[Instance, ...]:
        return (
            instance("router", "r", metrics="h:3"),
            instance("decode", "d", metrics="h:2"),
            instance("runner", "without-metrics"),
        )


async def test_targets_are_written_in_the_form_of_prometheus(tmp_path: Path) -> None:
    """One group per process that has metrics; no other file stays beside the list."""
    at: Any = Directory()
    await write_targets(at, file=tmp_path / "targets.json", every_s=None)
    assert json.loads((tmp_path / "targets.json").read_text()) == [
        {
            "targets": [address],
            "labels": {"cluster": "c", "service": kind, "instance": name},
        }
        for address, kind, name in (("h:2", "decode", "d"), ("h:3", "router", "r"))
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["targets.json"]


async def test_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    at: Any = Directory()
    with pytest.raises(InvalidArgument, match=r"--file .*absent/targets\.json"):
        await write_targets(at, file=tmp_path / "absent" / "targets.json", every_s=None)


async def test_targets_are_read_once_without_a_time_between_readings(tmp_path: Path) -> None:
    """`--every 0s` would read etcd without a pause."""
    at: Any = Directory()
    async with asyncio.timeout(60.0):
        await write_targets(at, file=tmp_path / "targets.json", every_s=0.0)
    assert (tmp_path / "targets.json").exists()
