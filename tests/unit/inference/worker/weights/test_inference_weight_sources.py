"""Sources of weights that hang, cut a stream short or send something else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import structlog
from prometheus_client import REGISTRY

from tests.support.inference.weight_sources import Source, Worker

FIRST = {"a": bytes(range(256)) * 8192, "b": b"tail"}
LARGE = {name: bytes([at]) * (1 << 20) for at, name in enumerate("abcd")}
SECOND = {"a": b"\1" * (3 << 20), "b": b"next"}


@asynccontextmanager
async def serving(*sources: Source) -> AsyncIterator[list[str]]:
    """The addresses of the sources while they serve."""
    addresses = [await source.start() for source in sources]
    try:
        yield addresses
    finally:
        for source in sources:
            await source.stop()


async def test_hung_weight_source_is_replaced() -> None:
    """Every worker fetches the weights from the trainer after a hung peer, without a restart."""
    hung, trainer = Source(hangs_after=0), Source()
    trainer.held[1] = FIRST
    async with serving(hung, trainer) as (hung_at, trainer_at):
        workers = [Worker() for _ in range(3)]
        for worker in workers:
            worker.show([hung_at], version=1)
            worker.publish(1, FIRST, source=trainer_at)
        for worker in workers:
            assert await worker.until_serving(1) == FIRST
            await worker.stop()
    assert hung.requests


async def test_next_source_continues_where_a_silent_one_stopped() -> None:
    """Bytes received before the silence are not fetched again."""
    halting, trainer = Source(hangs_after=1), Source()
    halting.held[1] = trainer.held[1] = FIRST
    async with serving(halting, trainer) as (halting_at, trainer_at):
        worker = Worker(silence_s=1.5)
        worker.show([halting_at], version=1)
        worker.publish(1, FIRST, source=trainer_at)
        assert await worker.until_serving(1) == FIRST
        await worker.stop()
    assert trainer.requests[0].from_byte == 1 << 20


async def test_damaged_slice_is_named_and_its_predecessors_stay() -> None:
    """Every source is checked slice by slice: the next one continues at the damaged slice."""
    wrong, trainer = Source(), Source()
    damaged = FIRST["a"][: 1 << 20] + b"\xff" + FIRST["a"][(1 << 20) + 1 :]
    wrong.held[1], wrong.manifests[1] = {**FIRST, "a": damaged}, FIRST
    trainer.held[1] = FIRST
    async with serving(wrong, trainer) as (wrong_at, trainer_at):
        worker = Worker(silence_s=60.0)
        worker.show([wrong_at], version=1)
        with structlog.testing.capture_logs() as logs:
            worker.publish(1, FIRST, source=trainer_at)
            assert await worker.until_serving(1) == FIRST
        await worker.stop()
    (given_up,) = [line for line in logs if line["event"] == "weight_source_given_up"]
    assert given_up["source"] == wrong_at
    assert given_up["error"].startswith("weights 1: slice 1 of a is damaged: its 1048576 bytes")
    assert trainer.requests[0].from_byte == 1 << 20


async def test_wrong_manifest_is_not_used() -> None:
    """Its sha256 is in the announcement: the next source is asked."""
    wrong, trainer = Source(), Source()
    wrong.held[1] = SECOND
    trainer.held[1] = FIRST
    async with serving(wrong, trainer) as (wrong_at, trainer_at):
        worker = Worker(silence_s=60.0)
        worker.show([wrong_at], version=1)
        worker.publish(1, FIRST, source=trainer_at)
        assert await worker.until_serving(1) == FIRST
        await worker.stop()
    assert not wrong.requests


async def test_peer_of_an_earlier_release_is_passed_over() -> None:
    """It has no FetchManifest; the log names it, and the trainer is asked."""
    earlier, trainer = Source(earlier=True), Source()
    earlier.held[1] = trainer.held[1] = FIRST
    async with serving(earlier, trainer) as (earlier_at, trainer_at):
        worker = Worker(silence_s=60.0)
        worker.show([earlier_at], version=1)
        with structlog.testing.capture_logs() as logs:
            worker.publish(1, FIRST, source=trainer_at)
            assert await worker.until_serving(1) == FIRST
        await worker.stop()
    (given_up,) = [line for line in logs if line["event"] == "weight_source_given_up"]
    assert (given_up["source"], given_up["error"]) == (earlier_at, "Method not found!")


async def test_newer_version_interrupts_a_fetch() -> None:
    """With less than half of the data, also from a source that hangs for long; the next fetch ends
    before another version is taken, so that each worker gets weights."""
    trainer, hung = Source(), Source(hangs_after=1)
    hung.held |= {1: LARGE, 2: LARGE, 3: LARGE}
    trainer.held |= {2: LARGE, 3: LARGE}
    async with serving(trainer, hung) as (trainer_at, hung_at):
        worker = Worker(silence_s=600.0)
        worker.publish(1, LARGE, source=hung_at)
        await hung.hung.wait()
        hung.hung.clear()
        worker.publish(2, LARGE, source=hung_at)
        await hung.hung.wait()
        assert 1 not in worker.engine.loaded
        worker.publish(3, LARGE, source=trainer_at)
        assert not await _any_soon(worker, 3)
        hung.go_on.set()
        assert await worker.until_serving(2) == LARGE
        assert await worker.until_serving(3) == LARGE
        await worker.stop()
    assert [request.weight_version for request in hung.requests] == [1, 2]


async def _any_soon(worker: Worker, version: int) -> bool:
    """Whether a version is in service after the announcements so far."""
    for _ in range(100):
        await asyncio.sleep(0)
    return version in worker.engine.loaded


async def test_wrong_bytes_of_a_silent_source_do_not_affect_the_next() -> None:
    """Without digests of slices, from a trainer of an earlier release, each source starts again
    after a wrong digest, so one of them alone is enough."""
    wrong, trainer = Source(hangs_after=1), Source()
    wrong.held[1] = {"a": bytes(len(FIRST["a"])), "b": FIRST["b"]}
    trainer.held[1] = FIRST
    async with serving(wrong, trainer) as (wrong_at, trainer_at):
        worker = Worker()
        worker.show([wrong_at], version=1)
        worker.publish_earlier(1, FIRST, source=trainer_at)
        assert await worker.until_serving(1) == FIRST
        await worker.stop()
    assert trainer.requests[-1].from_byte == 0


async def test_failed_source_is_tried_last() -> None:
    """For a minute after a failure every other source comes first."""
    hung, trainer = Source(hangs_after=0), Source()
    trainer.held |= {1: FIRST, 2: SECOND}
    async with serving(hung, trainer) as (hung_at, trainer_at):
        worker = Worker(silence_s=1.5)
        worker.show([hung_at], version=1)
        worker.publish(1, FIRST, source=trainer_at)
        await worker.until_serving(1)
        worker.show([hung_at], version=2)
        worker.publish(2, SECOND, source=trainer_at)
        assert await worker.until_serving(2) == SECOND
        await worker.stop()
    assert [request.weight_version for request in hung.requests] == [1]


async def test_worker_reports_hung_sources_and_takes_the_next_version() -> None:
    """Its metadata names version, source and reason until newer weights are in service."""
    hung, next_trainer = Source(hangs_after=0), Source()
    next_trainer.held[2] = SECOND
    async with serving(hung, next_trainer) as (hung_at, next_at):
        worker = Worker()
        worker.publish(1, FIRST, source=hung_at)
        said = await worker.until_announced(lambda metadata: "weights_error" in metadata)
        assert f"version 1: {hung_at}: the source sent nothing for 0.3 s" in said["weights_error"]
        worker.publish(2, SECOND, source=next_at)
        assert await worker.until_serving(2) == SECOND
        assert "weights_error" not in worker.announced[-1]
        await worker.stop()
    assert 1 not in worker.engine.loaded


async def test_newer_weights_end_the_search_for_a_version() -> None:
    """Between two sources the worker turns to the newest announced version."""
    hung, other, trainer = Source(hangs_after=0), Source(hangs_after=0), Source()
    trainer.held[2] = SECOND
    async with serving(hung, other, trainer) as (hung_at, other_at, trainer_at):
        worker = Worker()
        worker.show([hung_at, other_at], version=1)
        worker.publish(1, FIRST, source=trainer_at)
        asked = [asyncio.create_task(source.hung.wait()) for source in (hung, other)]
        await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        worker.publish(2, SECOND, source=trainer_at)
        assert await worker.until_serving(2) == SECOND
        await worker.stop()
        for task in asked:
            task.cancel()
    assert {request.weight_version for request in trainer.requests} == {2}
    # Either may then be the worker above it in the tree of version 2.
    asked_peers = [request.weight_version for request in [*hung.requests, *other.requests]]
    assert asked_peers.count(1) == 1


async def test_slow_source_is_not_replaced() -> None:
    """A stream may last longer than the deadline, which applies to each message."""
    slow = Source(pause_s=0.1)
    slow.held[1] = {f"t{n}": bytes([n]) for n in range(12)}
    async with serving(slow) as (slow_at,):
        worker = Worker(silence_s=1.0)
        worker.publish(1, slow.held[1], source=slow_at)
        assert await worker.until_serving(1) == slow.held[1]
        await worker.stop()
    assert len(slow.requests) == 1


async def test_version_without_memory_is_tried_again() -> None:
    """The worker keeps the earlier version, and its metadata has the reason."""
    trainer = Source()
    trainer.held |= {1: FIRST, 2: SECOND}
    async with serving(trainer) as (trainer_at,):
        worker = Worker(silence_s=60.0)
        worker.engine.lacks_memory.append(2)
        worker.publish(1, FIRST, source=trainer_at)
        await worker.until_serving(1)
        worker.publish(2, SECOND, source=trainer_at)
        said = await worker.until_announced(lambda metadata: "weights_error" in metadata)
        assert said["weights_error"] == "version 2: out of memory"
        assert said["weight_version"] == "1"
        assert await worker.until_serving(2) == SECOND
        await worker.stop()
    assert [request.weight_version for request in trainer.requests] == [1, 2]


async def test_refused_version_leaves_the_one_before_in_service() -> None:
    """Its bytes are not fetched again, metadata and metric say so, and the next version loads."""
    trainer = Source()
    trainer.held |= {1: FIRST, 2: SECOND, 3: FIRST}
    async with serving(trainer) as (trainer_at,):
        worker = Worker(silence_s=60.0)
        worker.engine.refuses.add(2)
        worker.publish(1, FIRST, source=trainer_at)
        await worker.until_serving(1)
        before = REGISTRY.get_sample_value("forge_inference_weights_refused_total")
        worker.publish(2, SECOND, source=trainer_at)
        said = await worker.until_announced(lambda metadata: "weights_error" in metadata)
        assert said["weights_error"] == (
            "version 2 is refused, version 1 stays in service: weights 2: a has NaN"
        )
        assert said["weight_version"] == "1"
        assert list(worker.follower.weights) == [1] and worker.follower._fetch is None
        assert REGISTRY.get_sample_value("forge_inference_weights_refused_total") == before + 1
        worker.publish(3, FIRST, source=trainer_at)
        await worker.until_serving(3)
        assert "weights_error" not in worker.announced[-1]
        await worker.stop()
    assert [request.weight_version for request in trainer.requests] == [1, 2, 3]


async def test_tensors_of_another_layout_are_refused() -> None:
    """An earlier release announces the digest of names, types and shapes: a source that names
    another type is given up, although its bytes are right."""
    trainer, other = Source(), Source()
    trainer.held[1] = other.held[1] = FIRST
    async with serving(trainer, other) as (trainer_at, other_at):
        worker = Worker()
        worker.publish_earlier(1, FIRST, source=trainer_at, layout="0" * 64)
        said = await worker.until_announced(lambda metadata: "weights_error" in metadata)
        assert "types or shapes are not those announced" in said["weights_error"]
        worker.publish(2, FIRST, source=other_at)
        other.held[2] = FIRST
        await worker.until_serving(2)
        await worker.stop()
    assert 1 not in worker.engine.loaded
