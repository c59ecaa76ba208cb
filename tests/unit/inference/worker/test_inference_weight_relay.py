"""Workers that fetch one publication at the same time."""

from __future__ import annotations

import asyncio

import pytest

from forge.core.errors import NotFound
from forge.core.named_tensor import NamedTensor
from services.inference.worker import weight_relay
from services.inference.worker.weight_assembly import WeightAssembly
from services.inference.worker.weight_relay import WeightRelay
from tests.support.inference.weight_sources import Source, Worker

WORKERS = 8
WEIGHTS = {f"t{number}": bytes([number]) * 1000 for number in range(6)}


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
    # Three tensors have left the trainer, and reach every worker before the fourth does.
    async with asyncio.timeout(60):
        while any(_received(worker) < 3 for worker in workers):
            await asyncio.sleep(0.01)
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
    """After the tensors that arrived; so does a version that is not fetched here."""
    monkeypatch.setattr(weight_relay, "ANNOUNCEMENT_S", 0.05)
    relay = WeightRelay()
    assembly = WeightAssembly(1, ["a", "b"], total_bytes=2)
    found = []
    with pytest.raises(NotFound, match="ended here"), relay.fetch():
        relay.show(assembly)
        assembly.tensors["a"] = NamedTensor(name="a", dtype="uint8", shape=(1,), data=b"1")
        tensors = relay.tensors(1, 0)
        found.append((await anext(tensors)).name)
        waiting = asyncio.ensure_future(anext(tensors))
        await asyncio.sleep(0)
        with relay.fetch():
            pass
        await waiting
    assert found == ["a"]
    with pytest.raises(NotFound, match="neither held nor fetched"):
        await anext(relay.tensors(2, 0))


def _received(worker: Worker) -> int:
    assembly = worker.follower._assembly
    return len(assembly.tensors) if assembly is not None else 0
