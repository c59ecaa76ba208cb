"""A worker on vLLM as a process: swaps under load, and kill -9 of it and of vLLM's own process.

Runs in the environment of `make engine-vllm` alone: `make test-engines`.
"""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from importlib import import_module
from itertools import groupby

import psutil
import pytest
import pytest_asyncio

from forge.v1 import inference_pb2
from tests.contract import engines
from tests.contract.engines import is_greedy, prompt_ids, published, reference
from tests.support.inference.cluster import InferenceCluster, Sample, inference_cluster
from tests.support.runtime.etcd import EtcdServer
from tests.support.runtime.waiting import until

pytestmark = pytest.mark.skipif(not engines.ON_VLLM, reason="runs by `make test-engines`")

VLLM = ("--engine", "vllm", "--dtype", "float32", "--kv.mib", "64", "--kv.cache-mib", "1")
CALLS = 6
BLOCK_TOKENS = engines.CACHED_BLOCK_TOKENS
ROUTER_BLOCK_TOKENS = engines.BLOCK_TOKENS


@pytest_asyncio.fixture(scope="module")
async def inference(
    shared_etcd: EtcdServer, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[InferenceCluster]:
    """A router, and a publisher in the trainer's place."""
    # The machine's memory holds one vLLM: that of the contract suite ends first.
    await import_module("tests.contract.vllm_engine").stop()
    folder = tmp_path_factory.mktemp("vllm")
    model = engines.CONFIGS["qwen3"]
    async with inference_cluster(folder, shared_etcd, "vllm", model=model) as cluster:
        await cluster.publisher.publish(published(reference("qwen3", seed=1)))
        cluster.start("router")
        yield cluster


def engine_of(inference: InferenceCluster, worker: str) -> psutil.Process:
    """vLLM's process of a worker."""
    started = json.loads(inference.log_of(worker).splitlines()[0])
    children = psutil.Process(started["pid"]).children(recursive=True)
    (found,) = [child for child in children if "VLLM::EngineCore" in "".join(child.cmdline())]
    return found


def check_versions(ids: list[int], sample: Sample) -> None:
    """The tokens up to the first swap are the choice of the version that they name; versions never
    fall."""
    assert sample.versions == sorted(sample.versions)
    version, first = next(groupby(sample.versions))
    assert is_greedy(reference("qwen3", seed=version), ids, sample.ids[: len(list(first))])


async def test_answers_go_on_through_swaps_and_a_lost_engine(inference: InferenceCluster) -> None:
    """Weights change three times under load: each token has the version that sampled it. With
    vLLM's process killed the worker ends with 1, and another one finishes the answers. With the
    worker killed its vLLM ends, too."""
    worker = inference.start("both", *VLLM)
    await inference.registered("decode", worker, weight_version="1")
    prompts = [prompt_ids(20 + n, seed=n) for n in range(CALLS)]
    calls = [asyncio.create_task(inference.sample(ids, max_tokens=400)) for ids in prompts]
    for version in (2, 3, 4):
        await inference.sampling(*calls)
        await inference.publisher.publish(published(reference("qwen3", seed=version)))
        await inference.registered("decode", worker, weight_version=str(version))
    samples = await asyncio.gather(*calls)
    for ids, sample in zip(prompts, samples, strict=True):
        check_versions(ids, sample)
    assert {version for sample in samples for version in sample.versions} >= {1, 2}
    fresh = await inference.sample(prompts[0])
    assert set(fresh.versions) == {4}
    assert is_greedy(reference("qwen3", seed=4), prompts[0], fresh.ids)

    calls = [asyncio.create_task(inference.sample(ids, max_tokens=400)) for ids in prompts]
    await inference.sampling(*calls)
    engine_of(inference, worker).send_signal(signal.SIGKILL)
    assert inference.exit_code(worker) == 1
    assert "vLLM's process ended: SIGKILL" in inference.log_of(worker)
    second = inference.start("both", *VLLM)
    await inference.registered("decode", second, weight_version="4")
    for ids, sample in zip(prompts, await asyncio.gather(*calls), strict=True):
        assert len(sample.ids) == 400
        assert is_greedy(reference("qwen3", seed=4), ids, sample.ids)

    engine = engine_of(inference, second)
    inference.kill(second)
    await until(lambda: not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE)


async def test_hanging_engine_ends_with_its_worker(inference: InferenceCluster) -> None:
    """vLLM's process is stopped under requests: neither a token nor an answer comes. After
    vllm.silence_s the worker kills it and ends with 1, and another one finishes the answers."""
    seed = version = inference.publisher.version
    worker = inference.start("both", *VLLM, "--vllm.silence-s", "20")
    await inference.registered("decode", worker, weight_version=str(version))
    prompts = [prompt_ids(20 + n, seed=n) for n in range(CALLS)]
    calls = [asyncio.create_task(inference.sample(ids, max_tokens=400)) for ids in prompts]
    await inference.sampling(*calls)
    engine = engine_of(inference, worker)
    engine.suspend()
    assert await asyncio.to_thread(inference.exit_code, worker) == 1
    assert "vLLM hangs: during requests there was no token" in inference.log_of(worker)
    assert not engine.is_running()
    second = inference.start("both", *VLLM)
    await inference.registered("decode", second, weight_version=str(version))
    for ids, sample in zip(prompts, await asyncio.gather(*calls), strict=True):
        assert len(sample.ids) == 400
        assert is_greedy(reference("qwen3", seed=seed), ids, sample.ids)
    inference.kill(second)
    await inference.forget_killed()


async def test_second_turn_goes_where_its_history_is_cached(inference: InferenceCluster) -> None:
    """Of two workers, by vLLM's events alone: the router is new and has seen no first turn. Nor has
    it measured a worker: one slow answer weighs more than the cached part of a short prompt."""
    version = str(inference.publisher.version)
    workers = [inference.start("both", *VLLM) for _ in range(2)]
    histories = [prompt_ids(300, seed=40 + n) for n in range(2)]
    for worker in workers:
        await inference.registered("decode", worker, weight_version=version)
    await inference.known_to_router(*workers)
    for worker, other, history in zip(workers, reversed(workers), histories, strict=True):
        await inference.drain(other, True)
        history += (await inference.sample(history)).ids + prompt_ids(4)
        await inference.drain(other, False)
        assert await computed_tokens(inference, worker) == 300

    second = await inference.registered("router", inference.start("router"))
    stub = inference.stub(second)
    blocks = 315 // BLOCK_TOKENS * (BLOCK_TOKENS // ROUTER_BLOCK_TOKENS)

    async def reported() -> bool:
        status = await stub.GetInferenceStatus(inference_pb2.GetInferenceStatusRequest())
        return [worker.reported_blocks for worker in status.workers] == [blocks, blocks]

    await until(reported)
    for history in histories:
        sample = Sample()
        async for response in stub.Sample(inference.request(history, max_tokens=1)):
            sample.add(response)
        assert sample.cached_tokens == 315 // BLOCK_TOKENS * BLOCK_TOKENS
    inference.kill(second.instance_id)
    for worker in workers:
        inference.kill(worker)
    await inference.forget_killed()


async def computed_tokens(inference: InferenceCluster, worker: str) -> int:
    """The prompt tokens that a worker has computed for the first router."""
    (found,) = [w for w in (await inference.status()).workers if w.instance_id == worker]
    return found.computed_tokens


async def test_prefill_and_decode_hand_over_through_swaps_and_a_lost_decode(
    inference: InferenceCluster,
) -> None:
    """Two workers of vLLM with separate roles behind the router: answers are the model's. After a
    swap under load, and with the decode worker killed and started again, each is whole."""
    prefill, decode = inference.start("prefill", *VLLM), inference.start("decode", *VLLM)
    version = inference.publisher.version
    await inference.registered("prefill", prefill, weight_version=str(version))
    await inference.registered("decode", decode, weight_version=str(version))
    prompts = [prompt_ids(90 + n, seed=n) for n in range(CALLS)]
    for ids, sample in zip(
        prompts, await asyncio.gather(*map(inference.sample, prompts)), strict=True
    ):
        assert set(sample.versions) == {version}
        assert sample.engines == ["vllm"]
        assert is_greedy(reference("qwen3", seed=version), ids, sample.ids)

    calls = [asyncio.create_task(inference.sample(ids, max_tokens=400)) for ids in prompts]
    await inference.sampling(*calls)
    newest = await inference.publisher.publish(published(reference("qwen3", seed=version + 1)))
    await inference.registered("prefill", prefill, weight_version=str(newest))
    await inference.registered("decode", decode, weight_version=str(newest))
    await inference.sampling(*calls)
    inference.kill(decode)
    second = inference.start("decode", *VLLM)
    await inference.registered("decode", second, weight_version=str(newest))
    for ids, sample in zip(prompts, await asyncio.gather(*calls), strict=True):
        assert len(sample.ids) == 400
        check_versions(ids, sample)
    fresh = await inference.sample(prompts[0])
    assert set(fresh.versions) == {newest}
    assert is_greedy(reference("qwen3", seed=newest), prompts[0], fresh.ids)
    inference.kill(prefill)
    inference.kill(second)
