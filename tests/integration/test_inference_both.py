"""Real workers of the role both: alone, killed in mid-answer, beside a prefill worker and beside
another engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.contract import engines
from tests.contract.engines import (
    BLOCK_TOKENS,
    is_greedy,
    prompt_ids,
    published,
    reference,
)
from tests.support.inference.cluster import InferenceCluster, Sample, inference_cluster
from tests.support.inference.table_engine import install_engines
from tests.support.inference.version_tables import VersionTables
from tests.support.runtime.etcd import EtcdServer
from tests.support.runtime.waiting import until

LONG = 400
LOCAL_TOKENS = 64


@pytest_asyncio.fixture(scope="module")
async def inference(
    shared_etcd: EtcdServer, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[InferenceCluster]:
    """A router and two workers of the role both, with weights."""
    folder = tmp_path_factory.mktemp("both")
    model = engines.CONFIGS["qwen3"]
    async with inference_cluster(folder, shared_etcd, "both", model=model) as cluster:
        await cluster.publisher.publish(published(reference("qwen3")))
        cluster.start("router", "--router.local-prefill-tokens", str(LOCAL_TOKENS))
        for name in [cluster.start("both") for _ in range(2)]:
            await cluster.registered("decode", name, weight_version="1", role="both")
        yield cluster


async def reads(inference: InferenceCluster) -> dict[str, int]:
    """Computed prompt tokens of each role."""
    found = {"prefill": 0, "both": 0}
    for worker in (await inference.status()).workers:
        found[worker.role] += worker.computed_tokens
    return found


async def test_turns_compute_only_their_new_tokens(inference: InferenceCluster) -> None:
    """No prefill worker exists; each turn finds prompt and answer of the one before."""
    history, known = prompt_ids(80), 0
    for turn in range(5):
        sample = await inference.sample(history)
        assert is_greedy(reference("qwen3"), history, sample.ids)
        assert sample.cached_tokens >= known - BLOCK_TOKENS
        known = len(history) + len(sample.ids) - 1
        history = history + sample.ids + prompt_ids(7, seed=turn)


@pytest.mark.faults
async def test_killed_worker_is_replaced_in_mid_answer(inference: InferenceCluster) -> None:
    """kill -9: the other one continues, and the caller sees no error."""
    ids = prompt_ids(40, seed=8)
    killed, sample = "", Sample()
    with inference.held_answers(LONG // 2) as held:
        async for response in await inference.call(ids, stream=True, max_tokens=LONG):
            sample.add(response)
            if not killed and len(sample.ids) > 20:
                (killed,) = await inference.sampling()
                inference.kill(killed)
                held.free()
    assert is_greedy(reference("qwen3"), ids, sample.ids)
    assert len(sample.ids) == LONG


async def test_long_prompts_are_handed_over_by_prefill(inference: InferenceCluster) -> None:
    """With a prefill worker a long prompt is read there, its next turn where it was sampled."""
    await inference.workers("prefill", 1)

    async def known() -> bool:
        return any(worker.role == "prefill" for worker in (await inference.status()).workers)

    await until(known)
    before = await reads(inference)
    ids = prompt_ids(300, seed=9)
    sample = await inference.sample(ids)
    after = await reads(inference)
    assert after["prefill"] - before["prefill"] == 300
    assert after["both"] == before["both"]
    turn = ids + sample.ids + prompt_ids(7, seed=10)
    follow_up = await inference.sample(turn)
    assert is_greedy(reference("qwen3"), turn, follow_up.ids)
    assert follow_up.cached_tokens >= 300 + 15 - BLOCK_TOKENS
    assert (await reads(inference))["prefill"] == after["prefill"]


@pytest.mark.faults
async def test_unlike_engines_share_load_swaps_and_deaths(
    inference: InferenceCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under load the weights change twice, and a worker of each engine is killed. Every answer is
    whole, each token has the log-prob of the version that it names, and versions do not fall. Only
    the engine that has cuts gets requests for them."""
    install_engines(tmp_path, monkeypatch, table="tests.support.inference.table_engine")
    embedded = [*inference.alive("both"), inference.start("both")]
    tables = [inference.start("both", "--engine", "table")]
    versions = VersionTables(inference)
    first = await versions.publish(*tables, *embedded)
    await inference.known_to_router(*tables, *embedded)
    plain = [prompt_ids(20 + n, seed=n) for n in range(8)]
    cut = [prompt_ids(30 + n, seed=n) for n in range(3)]
    calls = [
        *(inference.sample(ids, max_tokens=100, temperature=1.0, seed=7) for ids in plain),
        *(inference.sample(ids, max_tokens=100, temperature=1.0, top_k=5) for ids in cut),
    ]
    with inference.held_answers(50):
        running = [asyncio.create_task(call) for call in calls]
        for killed in (tables, embedded):
            await inference.sampling_on(*killed)
            last = await versions.publish(*tables, *embedded)
            await inference.sampling_on(*killed)
            inference.kill(killed.pop())
    samples = await asyncio.gather(*running)
    engines_of_plain = {name for one in samples[: len(plain)] for name in one.engines}
    assert engines_of_plain == {"embedded", "table"}
    for ids, sample in zip(plain, samples, strict=False):
        versions.check(ids, sample)
    for ids, sample in zip(cut, samples[len(plain) :], strict=True):
        versions.check(ids, sample, top_k=5)
        assert sample.engines == ["embedded"]
    assert {len(sample.ids) for sample in samples} == {100}
    assert {version for sample in samples for version in sample.versions} >= {first, last}
