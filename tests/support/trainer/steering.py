"""The steering of one trainer over a register and a directory, with workers in discovery."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from forge.runtime.coordination import Instance
from forge.runtime.rpc.channel import Channels
from forge.runtime.weights import WeightHold, hold_key
from forge.runtime.weights.bulk import BulkClient
from forge.runtime.weights.client import WeightClient
from services.trainer.actors.steering import Steering
from services.trainer.published.files import HeldFiles
from services.trainer.published.publisher import Publisher
from services.trainer.published.recovery import ServedVersions
from services.trainer.published.versions import PublishedVersions
from services.trainer.setting_tables import CanarySettings
from tests.support.inference.weight_sources import SECURITY
from tests.support.trainer.published_weights import FakeRegister, fetch, snapshot


def worker(kind: str, name: str, version: int = 0, address: str = "") -> Instance:
    metadata = {"weight_version": str(version)}
    return Instance(kind=kind, instance_id=name, address=address, metadata=metadata, revision=0)


WORKERS = [*(worker("decode", f"d{n}") for n in range(4)), worker("prefill", "p0")]


class SteeredTrainer:
    """One trainer process over a register and a directory that outlive it."""

    def __init__(
        self,
        register: FakeRegister,
        directory: Path,
        *,
        fence: int = 1,
        source: str = "host:1",
        workers: Sequence[Instance] = WORKERS,
        canary: CanarySettings = CanarySettings(),  # noqa: B008
    ) -> None:
        self.register = register
        self.directory = directory
        self.versions = PublishedVersions(kept=2)
        self.publisher = Publisher(register, self.versions, source=source, floor=0)

        self.workers = workers

        async def all_workers() -> Sequence[Instance]:
            return self.workers

        self.steering = Steering(
            register,
            self.versions,
            HeldFiles(directory),
            source=lambda: source,
            fence=lambda: fence,
            workers=all_workers,
            served=ServedVersions(
                WeightClient(Channels(SECURITY), BulkClient(SECURITY, enabled=True), silence_s=60.0)
            ),
            canary=canary,
        )

    async def publish(self, *steps: int) -> None:
        for step in steps:
            await self.publisher.publish(snapshot(step))

    def change_worker(self, name: str, **metadata: str) -> None:
        """Add to the metadata of one worker."""
        self.workers = [
            replace(one, metadata={**one.metadata, **metadata}) if one.instance_id == name else one
            for one in self.workers
        ]

    async def ask(self, message: Any) -> Any:
        return await self.steering.receive(message)

    @property
    def hold(self) -> WeightHold:
        """The hold in etcd."""
        return WeightHold.decode(self.register.entries[hold_key()].value)

    @property
    def files(self) -> list[str]:
        return sorted(one.name for one in self.directory.glob("*"))

    async def first_byte(self, version: int) -> int:
        return int((await fetch(self.versions.weights, version))[0].data[0])
