"""Real workers that freeze, die and swap while they sample: answers go on, versions never fall."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.contract import engines
from tests.contract.engines import is_greedy, prompt_ids, published, reference
from tests.support.inference.cluster import InferenceCluster, Sample, inference_cluster
from tests.support.runtime.etcd import EtcdServer

pytestmark = pytest.mark.faults

LONG = 450
VERSION_WAIT_S = 200
"""As long as a busy machine needs for a swap; otherwise older weights may continue an answer."""


@pytest_asyncio.fixture
async def inference(
    shared_etcd: EtcdServer, tmp_path_factory: pytest.TempPathFactory, cluster: str
) -> AsyncIterator[InferenceCluster]:
    """A publisher; a test starts what it needs."""
    folder = tmp_path_factory.mktemp("lost")
    model = engines.CONFIGS["qwen3"]
    async with inference_cluster(folder, shared_etcd, cluster, model=model) as running:
        await running.publisher.publish(published(reference("qwen3")))
        yield running


async def start_both(inference: InferenceCluster) -> str:
    name = inference.start("both")
    version = str(inference.publisher.version)
    await inference.registered("decode", name, weight_version=version)
    return name


async def test_frozen_worker_loses_its_calls_with_its_lease(inference: InferenceCluster) -> None:
    """SIGSTOP in mid-answer: its connection stays open, but the end of its lease moves its requests
    to the other worker, with the same tokens."""
    router = inference.start("router")
    names = [await start_both(inference) for _ in range(2)]
    ids = prompt_ids(40)
    frozen, sample = "", Sample()
    with inference.held_answers(LONG // 2) as held:
        async for response in await inference.call(ids, stream=True, max_tokens=LONG):
            sample.add(response)
            if not frozen and len(sample.ids) > 20:
                (frozen,) = await inference.sampling()
                inference.freeze(frozen)
                held.free()
                await inference.end_lease(frozen)
    assert len(sample.ids) == LONG
    assert is_greedy(reference("qwen3"), ids, sample.ids)
    # It is frozen still: neither its end nor an answer of it has moved the request.
    assert frozen in names
    lines = [json.loads(line) for line in inference.log_of(router).splitlines()]
    lost = [line for line in lines if line["event"] == "worker_lost"]
    assert [(line["worker"], line["calls"] > 0) for line in lost] == [(frozen, True)]


async def test_prefill_worker_does_not_wait_for_prompts_of_a_dead_router(
    inference: InferenceCluster,
) -> None:
    """Its decode worker is frozen before it fetches the prompt, then the router is killed: nobody
    can fetch it, and SIGTERM ends the worker before `drain_s`."""
    router = inference.start("router", "--router.hold-s", "3600")
    prefill, decode = inference.start("prefill"), inference.start("decode")
    version = str(inference.publisher.version)
    for role, name in (("prefill", prefill), ("decode", decode)):
        await inference.registered(role, name, weight_version=version)
    await inference.known_to_router(prefill, decode)
    inference.freeze(decode)
    call = await inference.call(prompt_ids(40), stream=True)
    first = await call.read()
    assert len(first.tokens.ids) == 4
    inference.kill(router)
    inference.terminate(prefill)
    assert await asyncio.to_thread(inference.exit_code, prefill) == 0
    assert "drain_cut_short" not in inference.log_of(prefill)


async def test_versions_never_fall_while_workers_swap_and_die(inference: InferenceCluster) -> None:
    """Three publications during long answers, and a kill -9 after each: every token is of the
    version of the one before it, or of a newer one."""
    inference.start("router", "--router.version-wait-s", str(VERSION_WAIT_S))
    workers = [await start_both(inference) for _ in range(2)]
    samples: list[Sample] = []

    async def read(seed: int) -> None:
        sample = Sample()
        samples.append(sample)
        async for response in await inference.call(
            prompt_ids(20 + seed, seed=seed), stream=True, max_tokens=LONG, temperature=1.0,
            seed=seed,
        ):  # fmt: skip
            sample.add(response)

    for publication in range(3):
        with inference.held_answers(LONG // 2):
            calls = [asyncio.create_task(read(4 * publication + n)) for n in range(4)]
            await inference.sampling(*calls)
            await inference.publisher.publish(published(reference("qwen3", seed=publication + 1)))
            # The dead one's answers meet a worker that may not have swapped yet.
            inference.kill(workers.pop(0))
        await asyncio.gather(*calls)
        workers.append(await start_both(inference))
    assert len(samples) == 12
    for sample in samples:
        assert len(sample.ids) == LONG
        assert sample.versions == sorted(sample.versions)
    assert len({version for sample in samples for version in sample.versions}) > 1
