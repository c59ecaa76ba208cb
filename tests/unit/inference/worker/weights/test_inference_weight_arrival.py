"""Tests: an engine that loads weights gets each tensor as it arrives."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import msgspec
import pytest

from forge.core.errors import ForgeError
from forge.core.named_tensor import HubPart
from forge.runtime.weights import ERROR_KEY, WeightManifest
from services.inference.engines.arriving import Arriving, Form
from services.inference.engines.base import Probe, UnfitWeights
from services.inference.worker.metrics import INTERRUPTED_FETCHES
from tests.support.inference import weight_sources
from tests.support.inference.weight_sources import Engine, Source, Worker
from tests.support.runtime.waiting import settle, until

SLICE = 1 << 20
WEIGHTS = {name: bytes([number]) * SLICE for number, name in enumerate("abcd")}


@dataclass
class ArrivingEngine(Engine):
    """Remembers the tensors in the order of their arrival."""

    seen: list[str] = field(default_factory=list)
    forms: dict[str, Form] = field(default_factory=dict)
    parts: dict[str, tuple[HubPart, ...]] = field(default_factory=dict)
    """On the hub, as the tensors have them."""
    failures: list[str] = field(default_factory=list)
    keeps: bool = False
    late: asyncio.Event | None = None
    """When it changes with the first version."""
    fits: bool = True

    async def load_arriving(
        self, arriving: Arriving, *, version: int, probe: Probe | None = None
    ) -> None:
        self.forms = dict(arriving.forms)
        if not self.fits:
            raise UnfitWeights(f"weights {version} are of another model")
        if self.late is not None and version == 1:
            await self.late.wait()
            arriving.keep()
            self.failures.append("began to change")
        if self.keeps:
            arriving.keep()
        found: dict[str, bytes] = {}
        try:
            async for tensor in arriving.tensors():
                self.seen.append(tensor.name)
                found[tensor.name] = bytes(tensor.data)
                self.parts[tensor.name] = tensor.hub
        except ForgeError as error:
            self.failures.append(str(error))
            raise
        assert {*await arriving.whole()} == {*found}
        self.loaded[version] = found


@asynccontextmanager
async def fetching(
    engine: ArrivingEngine, *, hangs_after: int, silence_s: float = 600.0
) -> AsyncIterator[tuple[Worker, Source, str]]:
    """A worker with version 1 announced by a trainer that sends so many tensors."""
    trainer = Source(hangs_after=hangs_after)
    trainer.held |= {1: WEIGHTS, 2: WEIGHTS}
    address = await trainer.start()
    worker = Worker(silence_s=silence_s, engine=engine)
    worker.publish(1, WEIGHTS, source=address)
    yield worker, trainer, address
    trainer.go_on.set()
    await worker.stop()
    await trainer.stop()


async def test_engine_gets_tensors_before_the_fetch_ends() -> None:
    """With the forms of all from the manifest."""
    engine = ArrivingEngine()
    async with fetching(engine, hangs_after=2) as (worker, trainer, _):
        await until(lambda: engine.seen == ["a", "b"])
        assert engine.forms["d"] == Form(dtype="uint8", shape=(SLICE,), size_bytes=SLICE)
        assert engine.parts == {"a": (), "b": ()}
        assert not worker.follower.weights
        trainer.go_on.set()
        assert await worker.until_serving(1) == WEIGHTS
        assert engine.seen == list(WEIGHTS)
        assert [tensor.name for tensor in worker.follower.weights[1].tensors] == list(WEIGHTS)


async def test_tensors_arrive_with_the_names_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a manifest that names them; forms have them before the data."""
    halves = HubPart("hub.{}", (2, SLICE // 4), 0, SLICE // 2, 2)
    without = weight_sources.manifest_of

    def named(version: int, weights: weight_sources.Weights) -> bytes:
        manifest = WeightManifest.decode(without(version, weights))
        return msgspec.structs.replace(manifest, hub={"a": (halves,)}).encode()

    monkeypatch.setattr(weight_sources, "manifest_of", named)
    engine = ArrivingEngine()
    async with fetching(engine, hangs_after=2) as (worker, trainer, _):
        await until(lambda: engine.seen == ["a", "b"])
        assert engine.parts == {"a": (halves,), "b": (HubPart("b", (SLICE,)),)}
        half = Form(dtype="uint8", shape=(2, SLICE // 4), size_bytes=SLICE // 2)
        assert [*engine.forms["a"].in_hub_names()] == [("hub.0", half), ("hub.1", half)]
        assert engine.forms["d"].hub == (HubPart("d", (SLICE,)),)
        trainer.go_on.set()
        await worker.until_serving(1)


async def test_manifest_of_another_model_ends_the_fetch() -> None:
    """The rest of the data is not waited for, and not fetched again."""
    engine = ArrivingEngine(fits=False)
    async with fetching(engine, hangs_after=1) as (worker, trainer, _):
        said = await worker.until_announced(lambda metadata: ERROR_KEY in metadata)
        assert "version 1 is refused" in said[ERROR_KEY]
        assert len(trainer.requests) <= 1


async def test_fetch_that_fails_fails_the_load() -> None:
    """The next attempt gives the tensors of this one again, and fetches the rest."""
    engine = ArrivingEngine()
    async with fetching(engine, hangs_after=2, silence_s=0.3) as (worker, trainer, _):
        assert await worker.until_serving(1) == WEIGHTS
        assert len(engine.failures) >= 1
        assert engine.seen[:2] == ["a", "b"]
        assert engine.seen[-4:] == list(WEIGHTS)
        assert trainer.requests[-1].from_tensor == 2


async def test_newer_version_waits_for_a_load_that_has_begun() -> None:
    """The engine has changed: it ends this version first."""
    engine = ArrivingEngine(keeps=True)
    async with fetching(engine, hangs_after=1) as (worker, trainer, address):
        await until(lambda: engine.seen == ["a"])
        worker.publish(2, WEIGHTS, source=address)
        await settle()
        assert engine.seen == ["a"]
        trainer.go_on.set()
        assert await worker.until_serving(1) == WEIGHTS
        assert await worker.until_serving(2) == WEIGHTS
        assert not engine.failures


async def test_load_of_an_overtaken_fetch_does_not_begin() -> None:
    """The fetch has given way before the engine changes; it would never have the rest."""
    engine = ArrivingEngine(late=asyncio.Event())
    async with fetching(engine, hangs_after=1) as (worker, trainer, address):
        await until(lambda: engine.forms)
        interrupted = INTERRUPTED_FETCHES._value.get()
        worker.publish(2, WEIGHTS, source=address)
        await settle()
        assert engine.late is not None
        engine.late.set()
        await until(lambda: INTERRUPTED_FETCHES._value.get() > interrupted)
        trainer.go_on.set()
        assert await worker.until_serving(2) == WEIGHTS
        assert not engine.failures


async def test_trainer_without_a_manifest_sends_a_whole_version() -> None:
    """Of an earlier release: the digest is one of all data."""
    engine = ArrivingEngine()
    trainer = Source(earlier=True)
    trainer.held[1] = WEIGHTS
    address = await trainer.start()
    worker = Worker(engine=engine)
    worker.publish_earlier(1, WEIGHTS, source=address)
    assert await worker.until_serving(1) == WEIGHTS
    assert not engine.seen
    await worker.stop()
    await trainer.stop()
