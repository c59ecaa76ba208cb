"""The lineage of a policy's weights: one trainer leads it, and none starts over unasked.

Owns the election of the trainer and the record in etcd of the newest checkpoint. The record allows
a trainer to distinguish a new run from a run whose checkpoints are on another host:

    no record, no trained group       a new lineage
    checkpoint of the lineage         continue it
    no checkpoint saved so far        continue it from the starting weights
    anything else                     refuse, unless `start_over` names the lineage to end

A trainer without leadership publishes nothing and rewinds nothing. It regains leadership after an
outage of etcd; it ends when another trainer was elected.
"""

from __future__ import annotations

import asyncio
import secrets
import shlex
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing
from importlib import metadata
from itertools import chain
from pathlib import Path
from types import MappingProxyType

import msgspec

from forge.core.errors import ConfigError, StaleFence, Unavailable
from forge.core.extras import DISTRIBUTION
from forge.runtime.concurrency.tasks import first_done
from forge.runtime.coordination import Coordinator, Leadership, Registration
from forge.runtime.stored_json import decode_stored
from forge.runtime.telemetry import log
from forge.runtime.weights import DEFAULT_POLICY, TRAINER_STANDBYS
from services.trainer.checkpoint.store import Checkpoint, CheckpointStore, fingerprint_of
from services.trainer.published.publisher import Superseded

WORKERS = ("prefill", "decode")
"""Kinds of instances that serve weights."""
ELECTION = f"trainer/{DEFAULT_POLICY}"
RECORD_KEY = f"trainer/{DEFAULT_POLICY}/lineage"
UNKNOWN = "unknown"
"""Value of `start_over` for trained groups whose lineage etcd does not have."""


class LineageRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The present lineage, stored in etcd as a JSON object of these fields."""

    lineage: str
    """Random id; each checkpoint of the lineage has it too."""
    fence: int
    """Fence of the leadership that wrote it."""
    step: int = 0
    """Step of the newest checkpoint; 0 before the first."""
    weight_version: int = 0
    """Newest published version when that checkpoint was captured."""
    checkpoint: str = ""
    """Host and directory of the newest checkpoint."""
    fingerprint: str = ""
    """Fingerprint of the newest checkpoint; empty from an earlier release."""
    model: dict[str, str] = {}
    """Fingerprints of the model's files (`agreed_model`); empty from an earlier release."""

    @classmethod
    def decode(cls, value: bytes) -> LineageRecord:
        """Raises `DataLoss` for a value that is not a record."""
        return decode_stored(value, cls, f"{RECORD_KEY} in etcd")


class Lineage:
    """One trainer's leadership and its view of the record."""

    def __init__(
        self,
        coordinator: Coordinator,
        *,
        trainer: str,
        location: str,
        start_over: str,
        ttl_s: float,
        model: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """`trainer` names this process, `location` host and directory of its checkpoints; `model`
        has the fingerprints of its model."""
        self._model = dict(model)
        self._coordinator = coordinator
        self._trainer = trainer
        self._location = location
        self._start_over = start_over
        self._ttl_s = ttl_s
        self._leadership: Leadership | None = None
        self.began_fence = 0
        """Fence of the record that this process wrote last."""
        self._known_fence = 0
        """Fence of the newest checkpoint here, at the start."""
        self.name = ""
        """Id of the lineage, from `begin` on."""
        self.recorded_step = 0
        """Step of the checkpoint that the record names, as far as this process knows: it must
        stay."""
        self._saving = asyncio.Lock()

    @property
    def fence(self) -> int:
        """Fence of the present leadership. Raises `Unavailable` without one."""
        if self._leadership is None or not self._leadership.alive:
            raise Unavailable("this trainer does not lead now: it has lost its lease in etcd")
        return self._leadership.fence

    def require_leadership(self) -> None:
        """Raises `Unavailable` without leadership."""
        _ = self.fence

    async def campaign(self, on_wait: Callable[[], None]) -> None:
        """Wait until elected; calls `on_wait` first if another trainer leads."""
        holder = await self._coordinator.get(f"leader/{ELECTION}")
        if holder is None:
            self._leadership = await self._campaign()
            return
        log.info("standby", leader=holder.value.decode())
        on_wait()
        entry = await self._announce_standby()
        try:
            self._leadership = await self._campaign()
        finally:
            if entry is not None:
                await entry.close()

    async def _announce_standby(self) -> Registration | None:
        """Shows this trainer to operators while it waits; without etcd it only waits."""
        instance_id, _, incarnation = self._trainer.partition(" ")
        try:
            return await self._coordinator.hold(
                f"{TRAINER_STANDBYS}{incarnation or instance_id}",
                lambda _: {
                    "instance": instance_id,
                    "host": self._location.partition(":")[0],
                    "version": metadata.version(DISTRIBUTION),
                },
                ttl_s=self._ttl_s,
                taken=lambda _: f"{self._trainer} stands by already",
            )
        except Unavailable as error:
            log.warning("standby_not_announced", error=str(error))
            return None

    async def superseded(self) -> None:
        """Returns once another trainer has begun; regains a leadership that was merely lost."""
        while True:
            assert self._leadership is not None, "campaign comes first"
            await self._leadership.lost()
            # Before `begin` the record is that of a former trainer.
            own_fence = max(self.began_fence, self._leadership.fence)
            campaign = asyncio.create_task(self._campaign())
            if campaign not in await first_done(campaign, self._other_leads()):
                return
            self._leadership = campaign.result()
            record, _ = await self._read_patiently()
            if record is not None and record.fence > own_fence:
                return
            log.info("leadership_regained", fence=self._leadership.fence)

    async def resign(self) -> None:
        """Let a standby begin at once."""
        if self._leadership is not None:
            await self._leadership.resign()

    async def lacks(self, newest_step: int) -> str | None:
        """The lineage to fetch a checkpoint of, if the newest one here is older than the recorded
        one: its id, or "" for any if etcd has no record; None if there is nothing to fetch."""
        record, _ = await self._read()
        if record is None:
            return None if newest_step else ""
        ends = record.lineage == self._start_over
        return None if ends or record.step <= newest_step else record.lineage

    async def check(self, store: CheckpointStore) -> None:
        """Raises `ConfigError` if the newest checkpoint here does not continue the lineage.

        In a shared directory a former trainer may have finished one of a later step after the
        record's trainer had begun, which has not continued from it: it is set aside.
        """
        checkpoints = store.newest_first()
        newest = next(checkpoints, None)
        if newest is not None:
            assert self._leadership is not None, "campaign comes first"
            # etcd was restored from an older snapshot if it is below.
            self._known_fence = newest.fence or 0
            await self._leadership.raise_above(self._known_fence)
        record, _ = await self._read()
        if record is None:
            return
        for checkpoint in () if newest is None else chain((newest,), checkpoints):
            if not _is_former(checkpoint, record):
                self._refuse_other(record, checkpoint)
                return
            log.warning("checkpoint_set_aside", step=checkpoint.step, fence=checkpoint.fence)
            store.set_aside(checkpoint)
        self._refuse_other(record, None)

    async def begin(
        self, checkpoint: Checkpoint | None, trained_groups: Callable[[], Awaitable[int]]
    ) -> int:
        """Take the lineage over with the restored checkpoint; return the highest weight version
        that may be in use.

        Raises `ConfigError` as `check` does, `Superseded` and `Unavailable`.
        """
        record, revision = await self._read()
        if record is None:
            if checkpoint is None and self._start_over != UNKNOWN:
                self._refuse_trained(await trained_groups())
            record = _new(checkpoint)
        elif record.fence > self.fence:
            raise Superseded(f"another trainer has taken over lineage {record.lineage}")
        else:
            self._refuse_other(record, checkpoint)
            if record.lineage == self._start_over:
                log.warning("lineage_ended", lineage=record.lineage, step=record.step)
                record = msgspec.structs.replace(_new(None), weight_version=record.weight_version)
        self.name = record.lineage
        floor = max(
            record.weight_version,
            checkpoint.weight_version if checkpoint else 0,
            await self._served_version(),
        )
        changed = self._at(
            record,
            step=checkpoint.step if checkpoint else 0,
            weight_version=floor,
            fingerprint=checkpoint.fingerprint if checkpoint else "",
        )
        await self._write(changed, revision)
        return floor

    async def _served_version(self) -> int:
        """The highest version in service. A version must not name other weights after etcd was
        restored from an older snapshot."""
        served = [0]
        for kind in WORKERS:
            workers = self._coordinator.discover(kind)
            await workers.known()
            shown = (each.metadata.get("weight_version", "") for each in workers.instances)
            served += (int(version) for version in shown if version.isdecimal())
        return max(served)

    async def saved(self, path: Path, *, step: int, weight_version: int) -> None:
        """Store that the checkpoint of `step` is durable here, unless a later one is.

        Without etcd the next call does.
        """
        try:
            fingerprint = await asyncio.to_thread(fingerprint_of, path)
            async with self._saving:
                record, revision = await self._read()
                if record is None or record.lineage != self.name:
                    raise StaleFence(f"the lineage in etcd is no longer {self.name}")
                if record.step <= step:
                    changed = self._at(
                        record, step=step, weight_version=weight_version, fingerprint=fingerprint
                    )
                    await self._write(changed, revision)
        except (Unavailable, StaleFence) as error:
            log.warning("checkpoint_not_announced", step=step, error=str(error))

    def _at(self, record: LineageRecord, **newest: int | str) -> LineageRecord:
        return msgspec.structs.replace(
            record, checkpoint=self._location, model=self._model, **newest
        )

    async def _campaign(self) -> Leadership:
        while True:
            won = await self._coordinator.campaign(ELECTION, self._trainer, ttl_s=self._ttl_s)
            try:
                await won.raise_above(max(self.began_fence, self._known_fence))
            except Unavailable:
                await won.resign()
            else:
                return won

    async def _other_leads(self) -> None:
        async with aclosing(self._coordinator.follow(f"leader/{ELECTION}")) as holders:
            async for holder in holders:
                if holder is not None and holder.value.decode() != self._trainer:
                    return

    async def _read(self) -> tuple[LineageRecord | None, int]:
        stored = await self._coordinator.get(RECORD_KEY)
        if stored is None:
            return None, 0
        return LineageRecord.decode(stored.value), stored.mod_revision

    async def _read_patiently(self) -> tuple[LineageRecord | None, int]:
        while True:
            try:
                return await self._read()
            except Unavailable:
                await asyncio.sleep(self._ttl_s / 4)

    async def _write(self, record: LineageRecord, revision: int) -> None:
        fence = self.fence
        value = msgspec.json.encode(msgspec.structs.replace(record, fence=fence))
        try:
            await self._coordinator.compare_and_swap(RECORD_KEY, value, expected_revision=revision)
        except StaleFence as error:
            raise Unavailable("the lineage has changed meanwhile: read it again") from error
        self.began_fence = fence
        self.recorded_step = record.step

    def _refuse_other(self, record: LineageRecord, checkpoint: Checkpoint | None) -> None:
        ends = record.lineage == self._start_over
        if ends and checkpoint is not None:
            raise ConfigError(
                f"start_over = {self._start_over} needs an empty checkpoint.dir, and "
                f"{self._location} has the checkpoint of step {checkpoint.step}"
            )
        if ends:
            return
        self._refuse_other_model(record)
        if not (here := self._lack(record, checkpoint)):
            return
        own_host, _, directory = self._location.partition(":")
        copy = ("rsync", "-a", record.checkpoint.removeprefix(own_host + ":") + "/", directory)
        raise ConfigError(
            f"the queue is trained by lineage {record.lineage}, whose checkpoints are at "
            f"{record.checkpoint}, the newest of step {record.step}; {self._location} has {here}. "
            f"Copy them with `{shlex.join(copy)}`, set checkpoint.dir to a directory that both "
            "hosts share, or end the lineage and train from the starting weights with "
            f"--start-over={record.lineage}"
        )

    def _refuse_other_model(self, record: LineageRecord) -> None:
        for name in sorted(record.model.keys() & self._model.keys()):
            if record.model[name] != self._model[name]:
                host, _, _ = self._location.partition(":")
                raise ConfigError(
                    f"lineage {record.lineage} trains {name.removeprefix('/model ')} "
                    f"{record.model[name]}, with checkpoints at {record.checkpoint}, and the "
                    f"model_path of {host} has {self._model[name]}: set model_path to the same "
                    "model, or end the lineage and train from the starting weights with "
                    f"--start-over={record.lineage}"
                )

    def _lack(self, record: LineageRecord, checkpoint: Checkpoint | None) -> str:
        """Describe what this host has instead of the newest checkpoint; empty if it has that."""
        if checkpoint is None:
            return "no checkpoint" if record.step else ""
        if checkpoint.lineage != record.lineage:
            return f"a checkpoint of lineage {checkpoint.lineage}, which must be removed first"
        if checkpoint.step > record.step or self._location == record.checkpoint:
            return ""
        if checkpoint.step < record.step:
            return f"only the checkpoint of step {checkpoint.step}"
        is_copy = record.fingerprint in ("", checkpoint.fingerprint)
        return "" if is_copy else f"another checkpoint of step {checkpoint.step}"

    def _refuse_trained(self, groups: int) -> None:
        if groups:
            raise ConfigError(
                f"the queue has {groups} trained groups, and neither etcd nor {self._location} "
                "has their checkpoint: set checkpoint.dir to its directory, or train from the "
                f"starting weights with --start-over={UNKNOWN}"
            )


def _is_former(checkpoint: Checkpoint, record: LineageRecord) -> bool:
    return (
        checkpoint.lineage == record.lineage
        and checkpoint.step > record.step
        and checkpoint.fence is not None
        and checkpoint.fence < record.fence
    )


def _new(checkpoint: Checkpoint | None) -> LineageRecord:
    """A lineage without a record: that of the checkpoint, or a new one."""
    return LineageRecord(
        lineage=checkpoint.lineage if checkpoint else secrets.token_hex(8), fence=0
    )
