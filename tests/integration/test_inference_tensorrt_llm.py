"""Real workers with engine = "tensorrt_llm", on the stand-in under the library's own name."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.contract import engines
from tests.contract.engines import is_greedy, prompt_ids, published, reference
from tests.support.inference.cluster import Sample, inference_cluster
from tests.support.inference.tensorrt_llm import install_stand_in
from tests.support.runtime.etcd import EtcdServer

pytestmark = pytest.mark.matrix

WORKER = ("--engine", "tensorrt_llm", "--device", "cuda")


async def test_processes_hand_over_and_take_new_weights(
    shared_etcd: EtcdServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The workers find, compare and import the library; a prompt goes from process to process, and
    an answer in flight continues with the next version, each token labelled by its weights."""
    path = [str(install_stand_in(tmp_path)), str(Path.cwd()), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    model = engines.CONFIGS["qwen3"]
    async with inference_cluster(tmp_path, shared_etcd, "trtllm", model=model) as cluster:
        # The library loads a checkpoint of its own before it takes the trainer's weights.
        reference("qwen3").save_pretrained(tmp_path / "model")
        await cluster.publisher.publish(published(reference("qwen3")))
        cluster.start("router")
        workers = {role: cluster.start(role, *WORKER) for role in ("prefill", "decode")}
        for role, name in workers.items():
            await cluster.registered(role, name, weight_version="1")
        ids, sample = prompt_ids(40), Sample()
        async for response in await cluster.call(ids, stream=True, max_tokens=400):
            sample.add(response)
            if len(sample.ids) > 20 and cluster.publisher.version == 1:
                await cluster.publisher.publish(published(reference("qwen3", seed=1)))
        before = sample.versions.count(1)
        assert sample.versions == before * [1] + (400 - before) * [2]
        assert before > 20
        assert is_greedy(reference("qwen3"), ids, sample.ids[:before])
        later = [*ids, *sample.ids[:before]]
        assert is_greedy(reference("qwen3", seed=1), later, sample.ids[before:])
        assert "Misuse" not in cluster.log_of(workers["decode"]) + cluster.log_of(
            workers["prefill"]
        )
