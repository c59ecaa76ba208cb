"""Workers on vLLM and on the embedded engine behind one router: load, swaps and kill -9.

Runs in the environment of `make engine-vllm` alone: `make test-engines`.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from functools import partial
from importlib import import_module
from typing import Any

import pytest
import pytest_asyncio

from forge.v1.common_pb2 import Grammar
from tests.contract import engines
from tests.contract.engines import prompt_ids, save_tokenizer
from tests.support.inference.cluster import InferenceCluster, inference_cluster
from tests.support.inference.version_tables import VersionTables
from tests.support.runtime.etcd import EtcdServer
from tests.support.runtime.scraped import by_label, scraped
from tests.support.runtime.waiting import until

pytestmark = pytest.mark.skipif(not engines.ON_VLLM, reason="runs by `make test-engines`")

VLLM = ("--engine", "vllm", "--dtype", "float32", "--kv.mib", "64", "--kv.cache-mib", "1")
EMBEDDED = ("--dtype", "float32")
MOST = 300
HELD_TOKENS = 100


@pytest_asyncio.fixture
async def inference(
    shared_etcd: EtcdServer, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[InferenceCluster]:
    """A router, and a publisher in the trainer's place."""
    # The machine's memory holds one vLLM: that of the contract suite ends first.
    await import_module("tests.contract.vllm_engine").stop()
    folder = tmp_path_factory.mktemp("mixed")
    model = engines.CONFIGS["qwen3"]
    async with inference_cluster(folder, shared_etcd, "mixed", model=model) as cluster:
        save_tokenizer(folder / "model")
        yield cluster


async def test_embedded_and_vllm_share_load_swaps_and_deaths(inference: InferenceCluster) -> None:
    """The weights change under load, then a worker is killed, for each engine. Every answer is
    whole, each token has the log-prob of the version that it names, and an answer with penalties,
    which both resume, is whole, too."""
    inference.start("router")
    vllm = inference.start("both", *VLLM)
    embedded = [inference.start("both", *EMBEDDED) for _ in range(2)]
    versions = VersionTables(inference)
    first = await versions.publish(vllm, *embedded)
    await inference.known_to_router(vllm, *embedded)
    plain = [prompt_ids(20 + n, seed=n) for n in range(10)]
    stateful = [prompt_ids(30 + n, seed=n) for n in range(4)]
    calls = [
        *(inference.sample(ids, max_tokens=MOST, temperature=1.0) for ids in plain),
        *(
            inference.sample(ids, max_tokens=MOST, temperature=1.0, presence_penalty=0.5)
            for ids in stateful
        ),
    ]
    running = [asyncio.create_task(call) for call in calls]
    left = [vllm, *embedded]
    for killed in (vllm, embedded[0]):
        await inference.sampling_on(killed)
        await versions.publish(*left)
        await inference.sampling_on(killed)
        inference.kill(killed)
        left.remove(killed)
    samples = await asyncio.gather(*running)
    assert {len(sample.ids) for sample in samples} == {MOST}
    assert {name for sample in samples for name in sample.engines} == {"embedded", "vllm"}
    for ids, sample in zip(plain, samples, strict=False):
        versions.check(ids, sample)
    for sample in samples[len(plain) :]:
        assert sample.versions == sorted(sample.versions)
    assert {version for sample in samples for version in sample.versions} >= {first, first + 1}

    # A new worker of vLLM takes its part again, with the newest weights.
    second = inference.start("both", *VLLM)
    newest = await versions.publish(second, *left)
    await inference.known_to_router(second)
    calls = [inference.sample(ids, max_tokens=40, temperature=1.0) for ids in plain]
    later = await asyncio.gather(*calls)
    for ids, sample in zip(plain, later, strict=True):
        assert set(sample.versions) == {newest}
        versions.check(ids, sample)
    assert {name for sample in later for name in sample.engines} == {"embedded", "vllm"}

    # vLLM declares grammars and min_tokens, and refuses them together.
    regex = Grammar(regex="[a-z]{6,8}")
    held = {"grammar": regex, "min_tokens": 3, "stop_token_ids": [engines.END]}
    for sample in await asyncio.gather(*(inference.sample(ids, **held) for ids in plain)):
        assert sample.engines == ["embedded"]
        assert re.fullmatch("[a-z]{6,8}", engines.text_of(sample.ids[:-1]))


async def test_answers_that_start_over_on_another_engine_are_counted(
    inference: InferenceCluster,
) -> None:
    """The embedded worker dies in mid-answer. vLLM with drafts continues seeded answers by other
    draws, and answers with cuts without shares. The router counts each by its reason, and no plain
    answer."""
    router = inference.start("router")
    embedded = inference.start("both", *EMBEDDED)
    versions = VersionTables(inference)
    await versions.publish(embedded)
    await inference.known_to_router(embedded)
    held = {"max_tokens": HELD_TOKENS * 2, "temperature": 1.0}
    asked: dict[str, list[dict[str, Any]]] = {
        "": [{}, {}],
        "draws": [{"seed": 1}, {"seed": 2}, {"seed": 3}],
        "shares": [{"top_k": 5}, {"top_k": 6}],
    }
    options = [one | held for group in asked.values() for one in group]
    prompts = [prompt_ids(20 + n, seed=n) for n in range(len(options))]
    with inference.held_answers(HELD_TOKENS):
        calls = [
            asyncio.create_task(inference.sample(ids, **one))
            for ids, one in zip(prompts, options, strict=True)
        ]
        await until(partial(has_read, inference, prompts))
        vllm = inference.start("both", *VLLM, "--vllm.draft-tokens", "2")
        await inference.known_to_router(vllm)
        inference.kill(embedded)
    samples = await asyncio.gather(*calls)
    for ids, one, sample in zip(prompts, options, samples, strict=True):
        assert sample.engines == ["embedded", "vllm"]
        if one.keys() == held.keys():
            versions.check(ids, sample)
    metadata = (await inference.registered("router", router)).metadata
    counted = by_label(
        await asyncio.to_thread(scraped, metadata),
        "forge_inference_requests_started_over_total",
        "reason",
    )
    # An attempt that fails on vLLM counts, too.
    least = {reason: len(group) for reason, group in asked.items() if reason}
    assert counted.keys() == least.keys()
    assert all(counted[reason] >= count for reason, count in least.items())


async def has_read(inference: InferenceCluster, prompts: list[list[int]]) -> bool:
    """Whether the router has the first token of each."""
    (worker,) = (await inference.status()).workers
    return worker.computed_tokens + worker.cached_tokens == sum(map(len, prompts))
