"""Real workers that die while a prompt goes from one to the other in blocks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.contract import engines
from tests.contract.engines import is_greedy, prompt_ids, published, reference
from tests.support.inference.cluster import InferenceCluster, inference_cluster
from tests.support.runtime.etcd import EtcdServer
from tests.support.runtime.waiting import until

pytestmark = pytest.mark.timeout(1800)
MOST = 8


@pytest_asyncio.fixture
async def inference(
    shared_etcd: EtcdServer, tmp_path: Path, cluster: str
) -> AsyncIterator[InferenceCluster]:
    """A publisher and a router with early hand-offs of short prompts."""
    model = engines.CONFIGS["qwen3"]
    async with inference_cluster(tmp_path, shared_etcd, cluster, model=model) as running:
        await running.publisher.publish(published(reference("qwen3")))
        running.start("router", "--router.early-hand-off-tokens", "64")
        yield running


async def start(inference: InferenceCluster, role: str) -> str:
    name = inference.start(role, "--pass-tokens", "4")
    await inference.registered(role, name, weight_version=str(inference.publisher.version))
    return name


async def handing_over(inference: InferenceCluster) -> tuple[str, str]:
    """The prefill and the decode worker of a prompt that is computed, once there is one."""
    found: list[str] = []

    async def both() -> bool:
        busy = [one for one in (await inference.status()).workers if one.running]
        found[:] = [one.instance_id for one in sorted(busy, key=lambda one: one.role != "prefill")]
        return {one.role for one in busy} == {"prefill", "decode"}

    await until(both)
    return found[0], found[1]


@pytest.mark.parametrize("dies", ["prefill", "decode"])
async def test_worker_dies_in_mid_hand_off(inference: InferenceCluster, dies: str) -> None:
    """kill -9 of either side while blocks travel, five times: each prompt gets its answer from the
    others, and their memory is free afterwards."""
    for role in ("prefill", "decode"):
        for _ in range(2):
            await start(inference, role)
    for seed in range(5):
        ids = prompt_ids(480, seed=seed)
        sampling = asyncio.create_task(inference.sample(ids, max_tokens=MOST))
        prefill, decode = await handing_over(inference)
        inference.kill(prefill if dies == "prefill" else decode)
        sample = await sampling
        assert len(sample.ids) == MOST
        assert is_greedy(reference("qwen3"), ids, sample.ids)
        await inference.forget_killed()
        await start(inference, dies)

    async def idle() -> bool:
        return not any(one.running or one.queued for one in (await inference.status()).workers)

    await until(idle)
