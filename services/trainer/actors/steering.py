"""Steering of the served weights: rollback, canary, promotion.

Owns the hold in etcd and the files of its versions, one operation at a time:

    pin the versions -> write their files -> compare and swap the hold -> remove other files

So a hold in etcd names only versions that survive this process. After an unknown outcome both the
old and the new versions stay pinned, and the next operation reads the hold again. Not here: workers
read the hold themselves, and the trainer continues to publish.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from forge.core.errors import (
    DataLoss,
    FailedPrecondition,
    InvalidArgument,
    ResourceExhausted,
    StaleFence,
    Unavailable,
)
from forge.runtime.actors.actor import Actor
from forge.runtime.coordination import Instance
from forge.runtime.security.audit import write_audit
from forge.runtime.security.tokens import Claims
from forge.runtime.telemetry import log
from forge.runtime.weights import (
    NO_HOLD,
    HeldWeights,
    WeightAnnouncement,
    WeightHold,
    hold_key,
)
from services.trainer import metrics
from services.trainer.published.canary_rules import SUBJECT, chosen_workers, next_step
from services.trainer.published.files import HeldFiles
from services.trainer.published.publisher import Register, Superseded
from services.trainer.published.recovery import ServedVersions
from services.trainer.published.versions import PublishedVersion, PublishedVersions
from services.trainer.setting_tables import CanarySettings

_KEY = hold_key()


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeHold:
    """Take over the hold in etcd, unless that was done. Raises `Unavailable`, `Superseded`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RollBack:
    """Serve one version until it is promoted; answered by the hold. Raises `NotFound`,
    `FailedPrecondition`, `ResourceExhausted`, `Unavailable`, `Superseded`."""

    version: int
    subject: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StartCanary:
    """Serve a version by a share of the workers; answered by the hold. The others serve the base
    of the present hold, or else the version before. Raises as `RollBack`, and `InvalidArgument`."""

    version: int
    share: float
    subject: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Promote:
    """End the hold: all workers follow the newest version; answered by the hold."""

    subject: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReviewCanary:
    """Take the next step of the automatic canary, if there is one; answered by its outcome or "".

    Raises as `RollBack`.
    """

    finished: bool = False
    """The run has ended: no further training can judge a canary."""


class Steering(Actor):
    """The hold of one policy."""

    def __init__(
        self,
        register: Register,
        versions: PublishedVersions,
        files: HeldFiles,
        *,
        source: Callable[[], str],
        fence: Callable[[], int],
        workers: Callable[[], Awaitable[Sequence[Instance]]],
        served: ServedVersions,
        canary: CanarySettings,
    ) -> None:
        """`source` returns this trainer's address, "" while it is unknown; `fence` that of the
        present leadership, or raises `Unavailable`; `workers` the workers in discovery; `served`
        fetches held versions that this host lacks; `canary`: the automatic canary."""
        self._register = register
        self._versions = versions
        self._files = files
        self._fence = fence
        self._workers = workers
        self._served = served
        self._automatic = canary
        self._own_address = source
        self._source = ""
        """Empty until the hold has been taken over."""

    async def receive(self, message: Any) -> Any:
        """Handles `ResumeHold`, `RollBack`, `StartCanary`, `Promote` and `ReviewCanary`."""
        if not self._source:
            await self._resume(self._own_address())
        match message:
            case ResumeHold():
                return None
            case RollBack(version=version, subject=subject):
                hold, revision = await self._read()
                wanted = WeightHold(base=self._announced(version), subject=subject)
                return await self._change(hold, wanted, revision)
            case StartCanary():
                hold, revision = await self._read()
                return await self._change(hold, await self._canary(hold, message), revision)
            case Promote(subject=subject):
                hold, revision = await self._read()
                return await self._change(hold, WeightHold(subject=subject), revision)
            case ReviewCanary(finished=finished):
                return await self._review(finished)
        return await super().receive(message)

    async def _resume(self, source: str) -> None:
        if not source:
            raise Unavailable("the trainer is starting: it is not in discovery yet")
        hold, revision = await self._read()
        self._versions.pin(hold.versions)
        for held in (hold.base, hold.canary):
            if held is not None:
                await self._hold_again(held, since_unix_s=hold.since_unix_s)
        await asyncio.to_thread(self._files.keep, hold.versions)
        if hold.base is not None:
            hold = msgspec.structs.replace(
                hold, base=_at(hold.base, source), canary=_at(hold.canary, source)
            )
            hold = await self._write(hold, revision)
        self._show(hold)
        self._source = source

    async def _hold_again(self, held: WeightAnnouncement, *, since_unix_s: float) -> None:
        """Hold a version from its files, or from a worker that serves it: another host led."""
        version = held.weight_version
        try:
            self._versions.store(*await asyncio.to_thread(self._files.read, version))
        except DataLoss as error:
            try:
                weights = await self._served.fetch(held, await self._workers())
                # Its time of publication was in the lost file: it was not later than the hold.
                one = PublishedVersion(announcement=held, published_unix_s=since_unix_s)
                stored = await asyncio.to_thread(self._files.write, one, weights)
            except (Unavailable, ResourceExhausted) as cause:
                # A worker that serves it still sends it to others.
                reason = f"{error}; {cause}"
                log.error("held_weights_missing", weight_version=version, error=reason)
                return
            self._versions.store(*stored)
            log.info("held_weights_fetched", weight_version=version, reason=str(error))

    async def _change(self, before: WeightHold, hold: WeightHold, revision: int) -> WeightHold:
        """Store a hold. One that is there already stays, so that a repeated call has no effect."""
        if _choice(before) == _choice(hold):
            self._show(before)
            return before
        self._versions.pin({*before.versions, *hold.versions})
        for version in hold.versions:
            one = self._versions.version(version)
            if not one.on_disk:
                self._versions.store(*await self._written(one))
        hold = msgspec.structs.replace(
            hold,
            base=_at(hold.base, self._source),
            canary=_at(hold.canary, self._source),
            since_unix_s=time.time(),
        )
        hold = await self._write(hold, revision)
        self._show(hold)
        self._versions.pin(hold.versions)
        await asyncio.to_thread(self._files.keep, hold.versions)
        log.info(
            "weights_held" if hold.base is not None else "weights_promoted",
            base=hold.base and hold.base.weight_version,
            canary=hold.canary and hold.canary.weight_version,
            canary_workers=hold.canary_workers,
            subject=hold.subject,
        )
        return hold

    async def _written(self, one: PublishedVersion) -> tuple[PublishedVersion, HeldWeights]:
        """Write a version durably, together with the ranks that hold segments of it. Raises
        `ResourceExhausted`, `Unavailable`."""
        weights, others = self._versions.weights[one.weight_version], self._versions.others
        if weights.segment is None or others is None:
            return await asyncio.to_thread(self._files.write, one, weights)
        file = await asyncio.to_thread(self._files.begin, one, weights)
        await others.write(one.weight_version, file, aligned_bytes=1, mapped=False)
        return await asyncio.to_thread(self._files.complete, one.weight_version)

    async def _review(self, finished: bool) -> str:
        hold, revision = await self._read()
        if not (self._automatic.share or hold.automatic):
            return ""
        step = next_step(
            self._automatic,
            hold,
            self._versions,
            await self._workers(),
            now_unix_s=time.time(),
            finished=finished,
        )
        if step is None:
            return ""
        await self._change(hold, step.hold, revision)
        metrics.CANARIES.labels(step.outcome).inc()
        version = hold.canary.weight_version if hold.canary is not None else None
        if step.outcome == "rolled_back":
            log.error("canary_rolled_back", weight_version=version, reason=step.reason)
        write_audit(
            "AutomaticCanary",
            Claims(subject=SUBJECT, scopes=frozenset({"service"})),
            peer="",
            code="OK",
            error=f"{step.outcome}: {step.reason}",
        )
        return step.outcome

    async def _read(self) -> tuple[WeightHold, int]:
        stored = await self._register.get(_KEY)
        if stored is None:
            return NO_HOLD, 0
        try:
            hold = WeightHold.decode(stored.value)
        except DataLoss as error:
            # Workers ignore it too.
            log.error("weight_hold_unreadable", key=_KEY, error=str(error))
            return NO_HOLD, stored.mod_revision
        if hold.fence > self._fence():
            raise Superseded("another trainer holds the weights: one cluster has one trainer")
        return hold, stored.mod_revision

    async def _write(self, hold: WeightHold, revision: int) -> WeightHold:
        hold = msgspec.structs.replace(hold, fence=self._fence())
        try:
            await self._register.compare_and_swap(_KEY, hold.encode(), expected_revision=revision)
        except StaleFence as error:
            raise Unavailable("the hold has changed meanwhile: look at it and try again") from error
        return hold

    def _show(self, hold: WeightHold) -> None:
        self._versions.hold = hold
        metrics.show_hold(hold)

    def _announced(self, version: int) -> WeightAnnouncement:
        if not version:
            raise InvalidArgument("weight_version = 0: name a version of ListWeights")
        return self._versions.version(version).announcement

    async def _canary(self, hold: WeightHold, asked: StartCanary) -> WeightHold:
        if not 0 < asked.share < 1:
            raise InvalidArgument(f"share = {asked.share:g}: must be above 0 and below 1")
        canary = self._announced(asked.version)
        base = hold.base
        if base is None:
            held = [one.announcement for one in self._versions.published]
            earlier = [one for one in held if one.weight_version < asked.version]
            if not earlier:
                raise FailedPrecondition(
                    f"no version before {asked.version} is held, which the other workers could "
                    "serve. The setting kept_versions is the number of versions that are kept"
                )
            base = earlier[-1]
        if base.weight_version == asked.version:
            raise FailedPrecondition(
                f"weight version {asked.version} is held for all workers: a canary is another one"
            )
        return WeightHold(
            base=base,
            canary=canary,
            canary_workers=chosen_workers(await self._workers(), asked.version, asked.share),
            subject=asked.subject,
        )


def _at(one: WeightAnnouncement | None, source: str) -> Any:
    """The announcement of a held version: `source` sends all of it from its file."""
    return one and msgspec.structs.replace(one, source=source, segments=())


def _choice(hold: WeightHold) -> tuple[tuple[int, ...], tuple[str, ...]]:
    return hold.versions, hold.canary_workers
