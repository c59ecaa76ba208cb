"""Weights of real processes that are killed, frozen and restarted while they send; large models."""

from __future__ import annotations

import os
from typing import Any

import pytest

from forge.core.named_tensor import NamedTensor
from tests.support.inference.weight_source_process import MIB, SourceProcess, weights
from tests.support.inference.weight_sources import Source, Worker
from tests.support.runtime.waiting import until

LARGE = bool(os.environ.get("FORGE_LARGE_WEIGHTS"))


def received(worker: Worker) -> int:
    """Bytes of the fetch that runs."""
    fetch = worker.follower._fetch
    return fetch.received_bytes if fetch is not None else 0


@pytest.mark.parametrize("failure", ["kill", "freeze"])
@pytest.mark.parametrize(
    ("cut", "least_mib", "most_mib"),
    [({"pause_s": 0.02}, 3, 24), ({"bulk_slices": 18}, 16, 18)],
    ids=["grpc", "bulk"],
)
async def test_next_source_continues_at_the_slice_of_one_that_fails(
    cut: dict[str, Any], least_mib: int, most_mib: int, failure: str
) -> None:
    """A killed source is left at once, a frozen one after the silence; no whole slice is sent
    twice, also where a bulk connection ends within one."""
    with SourceProcess(1, fill=7, mib=24, **cut) as first:
        trainer = Source()
        trainer.held[1] = weights(7, 24)
        worker = Worker(silence_s=2.0 if failure == "freeze" else 600.0)
        worker.show([first.address], version=1)
        worker.publish(1, trainer.held[1], source=await trainer.start())
        await until(lambda: received(worker) >= least_mib * MIB)
        first.kill() if failure == "kill" else first.freeze()
        assert await worker.until_serving(1) == trainer.held[1]
        await worker.stop()
        await trainer.stop()
    (request,) = trainer.requests
    assert least_mib * MIB <= request.from_byte <= most_mib * MIB
    assert request.from_byte % MIB == 0


async def test_restarted_trainer_ends_the_fetch_from_its_predecessor() -> None:
    """The trainer dies in the middle; its next version, at another address, is taken."""
    with SourceProcess(1, fill=7, mib=24, pause_s=0.02) as killed:
        worker = Worker(silence_s=600.0)
        worker.publish(1, weights(7, 24), source=killed.address)
        await until(lambda: received(worker) >= 3 * MIB)
        killed.kill()
        with SourceProcess(2, fill=8, mib=2) as restarted:
            worker.publish(2, weights(8, 2), source=restarted.address)
            assert await worker.until_serving(2) == weights(8, 2)
        await worker.stop()
    assert 1 not in worker.engine.loaded


async def test_model_of_many_tensors_is_fetched() -> None:
    """50,000 names exceed a value in etcd; small tensors share messages."""
    source = Source()
    source.held[1] = {f"model.layers.{at}.w": at.to_bytes(4, "big") for at in range(50_000)}
    worker = Worker(silence_s=600.0)
    worker.publish(1, source.held[1], source=await source.start())
    assert await worker.until_serving(1) == source.held[1]
    await worker.stop()
    await source.stop()


@pytest.mark.skipif(not LARGE, reason="10 GiB of memory: make large-weights")
async def test_tensor_of_5_gib_is_fetched() -> None:
    """More than a protobuf message holds, and than 32 bits count."""
    size_bytes = 5 << 30
    # Untouched zero pages take no memory at the source.
    source, worker = Source(), Worker(silence_s=600.0)
    source.held[1] = {"embed": bytes(size_bytes)}
    loaded: list[NamedTensor] = []

    async def load(tensors: dict[str, NamedTensor], *, version: int, probe: object) -> None:
        loaded.extend(tensors.values())
        worker.engine.loaded[version] = {}

    worker.engine.load = load  # type: ignore[method-assign, assignment]
    worker.publish(1, source.held[1], source=await source.start())
    await worker.until_serving(1)
    await worker.stop()
    await source.stop()
    (tensor,) = loaded
    assert len(tensor.data) == size_bytes and not any(memoryview(tensor.data)[-MIB:])
