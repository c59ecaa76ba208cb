"""The members of a group that receives a version: they join before the trainer sends."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from prometheus_client import REGISTRY

from forge.core.errors import ConfigError, FailedPrecondition
from forge.runtime.coordination import Instance
from forge.runtime.files import host_memory
from forge.runtime.settings.weight_group_settings import WeightGroupSettings
from forge.runtime.weights import MEMORY_KEY, WeightAnnouncement, manifest_key
from forge.runtime.weights.group_process import GROUP_KEY, GroupError
from services.trainer.config import TrainerConfig
from services.trainer.published.groups import WeightGroups
from services.trainer.published.local_copies import LocalCopies
from services.trainer.published.publisher import Publisher
from services.trainer.published.versions import PublishedVersions
from tests.support.runtime.waiting import until
from tests.support.trainer.published_weights import FakeRegister, snapshot

Observe = Callable[[Mapping[str, Any]], Awaitable[None]]


class Process:
    """A `GroupProcess` without a process: it names a port and ends as it is told."""

    def __init__(self, *, join_s: float) -> None:
        self.settings = WeightGroupSettings(backend="gloo", join_s=join_s)
        self.started = True
        self.sent: list[tuple[bytes, Mapping[str, Any]]] = []
        self.end = asyncio.Event()
        self.end.set()
        self.fails = False

    async def broadcast(self, file: int, order: Mapping[str, Any], observe: Observe) -> None:
        if self.fails:
            raise GroupError("not ready")
        self.sent.append((os.pread(file, 4, 0), order))
        await observe({"port": 7})
        await self.end.wait()

    def revive(self) -> None: ...

    async def close(self) -> None:
        self.started = False


class Trainer:
    """A publisher with workers in discovery."""

    def __init__(self, workers: Sequence[str], *, join_s: float = 600.0) -> None:
        self.places = dict.fromkeys(workers, "another host")
        self.process = Process(join_s=join_s)
        self.groups = WeightGroups(cast(Any, self.process), host="127.0.0.1", workers=self._workers)
        self.register = FakeRegister()
        self.copies = LocalCopies(workers=self._workers, directory="", groups=self.groups)
        self.publisher = Publisher(
            self.register,
            PublishedVersions(kept=2),
            source="host:1",
            floor=0,
            copies=self.copies,
        )

    async def _workers(self) -> Sequence[Instance]:
        return [
            Instance(
                kind="decode",
                instance_id=name,
                address="",
                metadata={GROUP_KEY: "gloo", MEMORY_KEY: place},
                revision=0,
            )
            for name, place in self.places.items()
        ]

    async def publish(self, step: int) -> tuple[str, ...]:
        """Publish; returns the announced ways."""
        await self.publisher.publish(snapshot(step))
        return WeightAnnouncement.decode(self.register.entries[manifest_key()].value).ways


@asynccontextmanager
async def trainer_of(*workers: str, join_s: float = 600.0) -> AsyncIterator[Trainer]:
    trainer = Trainer(workers, join_s=join_s)
    yield trainer
    await trainer.groups.close()
    trainer.copies.keep(())


def groups_that(outcome: str) -> float:
    labels = {"outcome": outcome}
    return REGISTRY.get_sample_value("forge_trainer_weight_groups_total", labels) or 0.0


async def test_group_forms_with_all_workers_that_can_join(memory: Path) -> None:
    """The trainer has rank 0; a worker on its host maps the file, and is not awaited."""
    async with trainer_of("a", "b") as trainer:
        trainer.places["neighbour"] = host_memory.place()
        assert await trainer.publish(1) == (host_memory.place(), "group/gloo")
        first = asyncio.create_task(trainer.groups.join(1, "b"))
        await asyncio.sleep(0)
        assert not trainer.process.sent
        places = await asyncio.gather(first, trainer.groups.join(1, "a"))
        assert [(one.port, one.rank, one.ranks) for one in places] == [(7, 1, 3), (7, 2, 3)]
    ((data, order),) = trainer.process.sent
    assert data[0] == 1
    assert (order["rank"], order["ranks"], order["address"]) == (0, 3, ("127.0.0.1", 0))
    assert order["size_bytes"] == 64


async def test_late_worker_is_refused(memory: Path) -> None:
    """After `join_s` the group forms without it; each version has one group, the newest alone."""
    before = groups_that("complete")
    async with trainer_of("a", "late", join_s=0.1) as trainer:
        await trainer.publish(1)
        assert (await trainer.groups.join(1, "a")).ranks == 2
        for version, name in ((1, "late"), (1, "a"), (2, "a")):
            with pytest.raises(FailedPrecondition, match=f"no group forms for weights {version}"):
                await trainer.groups.join(version, name)
        await until(lambda: groups_that("complete") == before + 1)


async def test_worker_that_is_lost_while_it_joins_is_no_member(memory: Path) -> None:
    """Nor is it awaited once it has left discovery."""
    async with trainer_of("a", "lost") as trainer:
        await trainer.publish(1)
        lost = asyncio.create_task(trainer.groups.join(1, "lost"))
        await asyncio.sleep(0)
        lost.cancel()
        await asyncio.wait({lost})
        waits = asyncio.create_task(trainer.groups.join(1, "a"))
        await asyncio.sleep(0)
        trainer.places.pop("lost")
        assert (await waits).ranks == 2


async def test_group_that_cannot_form_refuses_its_members(memory: Path) -> None:
    """The fleet starts, or the trainer's process is not ready or sends another version: workers
    fetch, and the next version has a group again."""
    before = groups_that("not_formed"), groups_that("failed")
    async with trainer_of() as trainer:
        await trainer.publish(1)
        with pytest.raises(FailedPrecondition, match="has not formed"):
            await trainer.groups.join(1, "a")
        trainer.places["a"], trainer.process.fails = "another host", True
        await trainer.publish(2)
        with pytest.raises(FailedPrecondition, match="has not formed"):
            await trainer.groups.join(2, "a")
        await until(
            lambda: (
                (groups_that("not_formed"), groups_that("failed")) == (before[0] + 1, before[1] + 1)
            )
        )
        trainer.process.started = False
        await trainer.publish(3)
        with pytest.raises(FailedPrecondition, match="no group forms"):
            await trainer.groups.join(3, "a")
        trainer.process.started, trainer.process.fails = True, False
        await trainer.publish(4)
        assert (await trainer.groups.join(4, "a")).rank == 1


async def test_newer_version_ends_the_wait_for_members(memory: Path) -> None:
    """And no broadcast that runs: its members have most of the version."""
    async with trainer_of("a", "b") as trainer:
        for version, begun in ((1, True), (2, False)):
            await trainer.publish(version)
            waits = asyncio.create_task(trainer.groups.join(version, "a"))
            await asyncio.sleep(0)
            if begun:
                await asyncio.sleep(0)
            trainer.groups.offer(99, os.memfd_create("newer"))
            with pytest.raises(FailedPrecondition, match="has not formed"):
                await waits
        await trainer.publish(3)
        trainer.process.end.clear()
        await asyncio.gather(trainer.groups.join(3, "a"), trainer.groups.join(3, "b"))
        before = groups_that("complete")
        await trainer.publish(4)
        trainer.process.end.set()
        await until(lambda: groups_that("complete") == before + 1)


async def test_publication_does_not_wait_for_a_group(memory: Path) -> None:
    """A broadcast that never ends costs the versions after it their groups alone, and no memory."""
    async with trainer_of("a", join_s=0.1) as trainer:
        trainer.process.end.clear()
        await trainer.publish(1)
        await trainer.groups.join(1, "a")
        for step in range(2, 6):
            await trainer.publish(step)
        assert len(list(memory.iterdir())) == 2


def test_network_that_others_see_is_refused() -> None:
    """Before the trainer starts."""
    settings = WeightGroupSettings(backend="nccl")
    TrainerConfig(weight_group=settings).validate()
    with pytest.raises(ConfigError, match="nccl sends weights without encryption"):
        TrainerConfig(weight_group=settings, host="10.0.0.1").validate()
