"""Workers that fetch one publication at the same time."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from forge.core.errors import NotFound
from forge.runtime.weights import HeldWeights, TensorEntry, WeightServicer
from forge.runtime.weights.assembly import WeightAssembly
from forge.runtime.weights.delta import DeltaEncoder
from forge.v1 import inference_pb2 as pb
from services.inference.worker.weights import relay as weight_relay
from services.inference.worker.weights.relay import WeightRelay
from tests.support.inference.weight_sources import Source, Worker, tensors_of
from tests.support.runtime.waiting import until
from tests.support.runtime.weight_responses import weight_responses

WORKERS = 8
WEIGHTS = {f"t{number}": bytes([number]) * (1 << 20) for number in range(6)}


async def fleet(silence_s: float) -> list[Worker]:
    """Workers that know each other, none with weights."""
    workers = [Worker(silence_s=silence_s, name=f"w{number}") for number in range(WORKERS)]
    addresses = {f"w{number}": await one.serve() for number, one in enumerate(workers)}
    for worker in workers:
        worker.meet(addresses)
    return workers


async def test_publication_leaves_the_trainer_once() -> None:
    """Eight workers in a tree: one fetches from the trainer, the others from one another, while it
    arrives there."""
    trainer = Source(hangs_after=3)
    trainer.held[1] = WEIGHTS
    address = await trainer.start()
    workers = await fleet(silence_s=60.0)
    for worker in workers:
        worker.publish(1, WEIGHTS, source=address)
    await trainer.hung.wait()
    # Three slices have left the trainer, and reach every worker before the fourth does.
    await until(lambda: all(_received(worker) >= 3 << 20 for worker in workers))
    assert not any(worker.follower.weights for worker in workers)
    trainer.go_on.set()
    for worker in workers:
        assert await worker.until_serving(1) == WEIGHTS
    for worker in workers:
        await worker.stop()
    await trainer.stop()
    assert len(trainer.requests) == 1


async def test_worker_leaves_a_relay_that_fails() -> None:
    """The worker above cannot fetch at all: those below go to the trainer themselves."""
    trainer = Source()
    trainer.held[1] = WEIGHTS
    address = await trainer.start()
    workers = await fleet(silence_s=0.5)
    for worker in workers[1:]:
        worker.publish(1, WEIGHTS, source=address)
    for worker in workers[1:]:
        assert await worker.until_serving(1) == WEIGHTS
    for worker in workers:
        await worker.stop()
    await trainer.stop()


async def test_relay_of_a_failed_fetch_ends_with_not_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After the slices that arrived, also of an unfinished tensor; so does a version that is not
    fetched here."""
    monkeypatch.setattr(weight_relay, "ANNOUNCEMENT_S", 0.05)
    relay = WeightRelay()
    weights = {"a": b"1", "b": b"2" * (3 << 20)}
    tensors = tensors_of(weights)
    assembly = WeightAssembly(
        1, list(weights), total_bytes=(3 << 20) + 1, entries=[*map(TensorEntry.of, tensors)]
    )
    request = pb.FetchWeightsRequest(slices=True, groups=True)
    responses = [one async for one in weight_responses(request, tensors)]
    found = []
    with pytest.raises(NotFound, match="ended here"), relay.fetch(1):
        relay.show(assembly, b"manifest")
        parts = relay.parts(1, 0, 0, base_version=0)
        for response in responses[:2]:
            await assembly.add(response)
            found += [(part.tensor.name, part.start) for part in await anext(parts)]
        waiting = asyncio.ensure_future(anext(parts))
        await asyncio.sleep(0)
        with relay.fetch(1):
            pass
        await waiting
    assert found == [("a", 0), ("b", 0)]
    with pytest.raises(NotFound, match="neither held nor fetched"):
        await anext(relay.parts(2, 0, 0, base_version=0))
    with pytest.raises(NotFound, match="neither held nor fetched"):
        await relay.manifest(2)


async def test_changes_are_relayed_as_they_arrived() -> None:
    """To a worker with the same base, in slices; one with another base gets whole tensors, and one
    without a base also after a later delta was damaged."""
    rng = np.random.default_rng(0)
    size = 8 << 20
    old = {"a": rng.bytes(size), "b": b"b"}
    changed = np.frombuffer(old["a"], np.uint8) ^ (rng.random(size) < 0.2).astype(np.uint8)
    new = {"a": changed.tobytes(), "b": b"b"}
    tensors = tensors_of(new)
    encoder = DeltaEncoder()
    held = {1: HeldWeights(tensors=tensors_of(old)), 2: HeldWeights(tensors=tensors)}
    source = WeightServicer(lambda: held, deltas=encoder)
    request = pb.FetchWeightsRequest(weight_version=2, slices=True, groups=True, base_version=1)
    assembly = WeightAssembly(
        2,
        list(new),
        total_bytes=size + 1,
        entries=[*map(TensorEntry.of, tensors)],
        base_version=1,
        base={one.name: one for one in tensors_of(old)},
    )
    relay = WeightRelay()
    with relay.fetch(1):
        relay.show(assembly, b"manifest")
        async for response in source.FetchWeights(request, None):
            await assembly.add(response)
        assert assembly.complete and 1 << 20 < assembly.wire_bytes < size // 2
        for base_version, sent_bytes in ((1, assembly.wire_bytes), (7, size + 1)):
            groups = [one async for one in relay.parts(2, 0, 0, base_version=base_version)]
            assert sum(len(part.data) for group in groups for part in group) == sent_bytes
        assembly.refuse_deltas()
        groups = [one async for one in relay.parts(2, 0, 0, base_version=0)]
        assert b"".join(part.data for group in groups for part in group) == new["a"] + new["b"]


def _received(worker: Worker) -> int:
    fetch = worker.follower._fetch
    return fetch.received_bytes if fetch is not None else 0


async def test_wait_for_data_begins_at_its_call() -> None:
    """Data that arrives before the first step of the waiting task ends the wait, too."""
    relay = WeightRelay()
    wait = asyncio.ensure_future(relay.changed())
    relay.progress()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert wait.done()
