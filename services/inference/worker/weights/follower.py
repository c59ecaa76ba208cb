"""Follows the weights announced in etcd: fetches, verifies and swaps them in.

The bytes come from a worker with the announced version, else from the worker above in a tree of all
workers, which relays them while it fetches, else from the trainer (`fetch`). On any failure
the old version stays in service; each new attempt fetches the newest announced version. A newer one
interrupts a fetch that has less than half of its data. A version that the engine refuses is not
fetched again. During a hold the worker serves the held version, even if it is an older one. Keeps
the bytes as published, since other workers fetch them and check their digest.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import aclosing, nullcontext, suppress

from forge.core.errors import DataLoss, ForgeError
from forge.runtime.concurrency.backoff import Backoff
from forge.runtime.concurrency.tasks import cancel_and_wait
from forge.runtime.process.service import ServiceContext
from forge.runtime.serving_groups import kind_in, starting_in
from forge.runtime.telemetry import log
from forge.runtime.weights import (
    ERROR_KEY,
    MEMORY_KEY,
    NO_HOLD,
    HeldWeights,
    WeightAnnouncement,
    WeightHold,
    WeightProbe,
    hold_key,
    manifest_key,
)
from forge.runtime.weights.bulk import BulkClient
from forge.runtime.weights.client import WeightClient
from services.inference.config import InferenceConfig
from services.inference.engines.base import BrokenWeights, Engine, Probe, UnfitWeights
from services.inference.worker.discovery_entry import DiscoveryEntry
from services.inference.worker.metrics import (
    ANNOUNCED_VERSION,
    FETCH_FAILURES,
    INTERRUPTED_FETCHES,
    REFUSED_VERSIONS,
    WEIGHT_VERSION,
)
from services.inference.worker.weights.arrival import Arrival
from services.inference.worker.weights.fetch import Interrupted, WeightFetch
from services.inference.worker.weights.group import group_member
from services.inference.worker.weights.local_weights import LocalWeights
from services.inference.worker.weights.relay import WeightRelay
from services.inference.worker.weights.sources import WeightSources


class WeightFollower:
    """Keeps an engine at the newest weights announced."""

    def __init__(self, context: ServiceContext, engine: Engine, *, policy: str) -> None:
        self.weights: Mapping[int, HeldWeights] = {}
        """The version in service, as published; empty before the first."""
        self._context = context
        self._engine = engine
        self._key, self._hold_key = manifest_key(policy), hold_key(policy)
        group = context.config.serving_group
        kinds = (kind_in(group, "prefill"), kind_in(group, "decode"), starting_in(group))
        self._peers = tuple(context.coordinator.discover(kind) for kind in kinds)
        self._entry = DiscoveryEntry(context, kind=starting_in(group))
        self._own_id = context.config.instance_id
        self._sources = WeightSources(self._peers, own_id=self._own_id, fetches=self._fetches)
        self._client = WeightClient(
            context.channels,
            BulkClient(context.security, enabled=context.config.bulk.enabled),
            silence_s=context.config.weight_silence_s,
        )
        self._local = LocalWeights(directory=context.config.weights_dir)
        # The trainer uses the memory of its host while a worker names it.
        context.metadata[MEMORY_KEY] = self._local.place
        self._group = group_member(context)
        self.relay = WeightRelay()
        """The version during its fetch."""
        self._newest: WeightAnnouncement | None = None
        self._hold: WeightHold | None = None
        """None until it is known."""
        self._fetch: WeightFetch | None = None
        """The newest attempt."""
        self._interrupted = False
        """The last fetch gave way to a newer version."""
        self._refused_version = 0
        """The newest version that the engine refused."""
        self._news = asyncio.Event()

    async def run(self) -> None:
        """Follow until cancelled."""
        async with self._group or nullcontext(), asyncio.TaskGroup() as tasks:
            tasks.create_task(self._entry.run())
            tasks.create_task(self._listen())
            tasks.create_task(self._listen_for_holds())
            tasks.create_task(self._keep_up())

    async def _listen(self) -> None:
        # Peers first: with an empty view it would fetch from the trainer.
        for peers in self._peers:
            await peers.known()
        await self._entry.tried()
        async with aclosing(self._context.coordinator.follow(self._key)) as announced:
            async for value in announced:
                if value is None:
                    continue
                try:
                    self._newest = WeightAnnouncement.decode(value.value)
                except DataLoss as error:
                    log.error("weight_manifest_unreadable", key=self._key, error=str(error))
                    continue
                self._tell()

    async def _listen_for_holds(self) -> None:
        async with aclosing(self._context.coordinator.follow(self._hold_key)) as holds:
            async for value in holds:
                try:
                    self._hold = NO_HOLD if value is None else WeightHold.decode(value.value)
                except DataLoss as error:
                    log.error("weight_hold_unreadable", key=self._hold_key, error=str(error))
                    # A worker that starts serves the newest version; any other keeps what it had.
                    self._hold = self._hold or NO_HOLD
                self._tell()

    @property
    def _wanted(self) -> WeightAnnouncement | None:
        """The version to serve; None while it is unknown."""
        if self._hold is None:
            return None
        return self._hold.wanted(self._own_id, self._newest)

    @property
    def _holds(self) -> bool:
        return self._hold is not None and self._hold.base is not None

    def _tell(self) -> None:
        if (wanted := self._wanted) is not None:
            ANNOUNCED_VERSION.set(wanted.weight_version)
        self._news.set()

    def _fetches(self, instance_id: str, version: int) -> bool:
        """Whether an instance is to serve a version; during a hold not all are."""
        if self._hold is None or not self._holds:
            return True
        wanted = self._hold.wanted(instance_id, self._newest)
        return wanted is not None and wanted.weight_version == version

    def _is_settled(self, announced: WeightAnnouncement) -> bool:
        """Whether a version is in service or was refused, or is older than one that was. Only a
        hold goes back to an older one."""
        known = {self._refused_version, *self.weights}
        version = announced.weight_version
        return version in known or (not self._holds and version < max(known))

    async def _keep_up(self) -> None:
        backoff = Backoff(0.2, 10.0)
        while True:
            self._news.clear()
            announced = self._wanted
            if announced is None or self._is_settled(announced):
                await self._news.wait()
                continue
            try:
                await self._obtain(announced)
                backoff.reset()
            except Interrupted as error:
                self._interrupted = True
                INTERRUPTED_FETCHES.inc()
                log.info("weight_fetch_interrupted", reason=str(error))
            except (BrokenWeights, UnfitWeights) as error:
                await self._refuse(announced, error)
            except (ForgeError, MemoryError) as error:
                FETCH_FAILURES.inc()
                pause_s = backoff.next_s()
                reason = str(error) or "out of memory"
                log.warning(
                    "weights_not_obtained",
                    weight_version=announced.weight_version,
                    retry_in_s=pause_s,
                    error=reason,
                )
                await self._announce_error(f"version {announced.weight_version}: {reason}")
                # Newer weights end the wait.
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._news.wait(), pause_s)

    async def _refuse(self, announced: WeightAnnouncement, error: ForgeError) -> None:
        """Stay with the version in service: the same bytes again would be refused again."""
        REFUSED_VERSIONS.inc()
        # Its data would stay in memory until the next version.
        self._fetch = None
        version = self._refused_version = announced.weight_version
        kept = max(self.weights, default=0)
        log.error(
            "weights_refused", weight_version=version, in_service=kept or None, error=str(error)
        )
        stays = f"version {kept} stays in service" if kept else "none is in service"
        await self._announce_error(f"version {version} is refused, {stays}: {error}")

    async def _announce_error(self, text: str) -> None:
        if self._context.metadata.get(ERROR_KEY) != text:
            self._context.metadata[ERROR_KEY] = text
            await self._context.announce()

    async def _obtain(self, announced: WeightAnnouncement) -> None:
        began_s = fetched_s = time.monotonic()

        def note(_: object) -> None:
            nonlocal fetched_s
            fetched_s = time.monotonic()

        with self.relay.fetch(announced.weight_version):
            fetch = self._fetch_of(announced)
            fetch.begin()
            run = asyncio.create_task(self._fetched(fetch))
            run.add_done_callback(note)
            try:
                await self._load(fetch, run)
                held = await run
            finally:
                await cancel_and_wait(run)
            self.weights = {announced.weight_version: held}
        self._fetch, self._interrupted = None, False
        WEIGHT_VERSION.set(announced.weight_version)
        log.info(
            "weights_swapped",
            weight_version=announced.weight_version,
            step=announced.step,
            source=fetch.source,
            way=fetch.way,
            wire_bytes=fetch.wire_bytes,
            total_bytes=announced.total_bytes,
            fetch_s=round(fetched_s - began_s, 3),
            swap_s=round(time.monotonic() - fetched_s, 3),
        )
        self._context.metadata.pop(ERROR_KEY, None)
        self._context.metadata["weight_version"] = str(announced.weight_version)
        self._context.set_ready()
        await self._context.announce()
        self._entry.end()

    async def _load(self, fetch: WeightFetch, run: asyncio.Task[HeldWeights]) -> None:
        """Have the engine serve the version that `run` fetches; during the fetch if it can."""
        version, config = fetch.announced.weight_version, self._context.config
        load_arriving = getattr(self._engine, "load_arriving", None)
        arriving = await Arrival.begun(fetch, run, self.relay) if load_arriving else None
        if load_arriving is not None and arriving is not None:
            probe = _probe_of(fetch.probe, config)
            await load_arriving(arriving, version=version, probe=probe)
            return
        tensors = {tensor.name: tensor for tensor in (await run).tensors}
        probe = _probe_of(fetch.probe, config)
        await self._engine.load(tensors, version=version, probe=probe)

    def _fetch_of(self, announced: WeightAnnouncement) -> WeightFetch:
        """Return the fetch of this announcement, with the data of earlier attempts, or a new
        one."""
        if self._fetch is None or self._fetch.announced != announced:
            self._fetch = WeightFetch(
                announced,
                group=self._group,
                sources=self._sources,
                client=self._client,
                relay=self.relay,
                local=self._local,
                served=self.weights,
                is_overtaken=lambda: self._wanted != announced,
            )
        return self._fetch

    async def _fetched(self, fetch: WeightFetch) -> HeldWeights:
        """Run a fetch. Raises `Interrupted` when newer weights should be fetched instead."""
        run = asyncio.create_task(fetch.run())
        try:
            while not run.done():
                self._news.clear()
                if self._is_overtaken(fetch):
                    fetch.interrupt()
                news = asyncio.ensure_future(self._news.wait())
                await asyncio.wait((run, news), return_when=asyncio.FIRST_COMPLETED)
                news.cancel()
            return run.result()
        finally:
            await cancel_and_wait(run)

    def _is_overtaken(self, fetch: WeightFetch) -> bool:
        """Whether a hold is of another version, or a newer version is announced and the larger part
        of this one is missing.

        The latter not twice in a row: a fetch that takes longer than the time between two
        publications would never end.
        """
        wanted, version = self._wanted, fetch.announced.weight_version
        if self._holds:
            return wanted is not None and wanted.weight_version != version
        newer = wanted is not None and wanted.weight_version > version
        missing = 2 * fetch.received_bytes < fetch.announced.total_bytes
        return newer and missing and not self._interrupted


def _probe_of(probe: WeightProbe | None, config: InferenceConfig) -> Probe | None:
    """Return a manifest's probe, with the limits of the worker's settings, for the engine; None
    without a usable one."""
    if probe is None or len(probe.ids) < 2 or len(probe.logprobs) != len(probe.ids) - 1:
        return None
    fits = len(probe.published) == len(probe.logprobs)
    return Probe(
        ids=tuple(probe.ids),
        logprobs=tuple(probe.logprobs),
        published=tuple(probe.published) if fits else (),
        most_error=config.probe_error,
        most_exact_error=config.probe_exact_error,
    )
