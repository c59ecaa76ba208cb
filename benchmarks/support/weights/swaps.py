"""Swaps of weights under a running answer: a router and a worker as processes, a real publisher."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.support.inference.engine_costs import SHAPES
from forge.core.named_tensor import NamedTensor
from forge.runtime import weights
from forge.runtime.coordination import Coordinator
from forge.runtime.rpc.server import RpcServer
from forge.v1 import inference_pb2_grpc as rpc
from services.inference.engines.tensor_bytes import to_named
from services.trainer.published.publisher import Publisher, Snapshot
from services.trainer.published.versions import PublishedVersions
from tests.support.inference.cluster import InferenceCluster
from tests.support.runtime.etcd import EtcdServer

_WARM_TOKENS = 20
_SETTLED_TOKENS = 30
_QUIET_TOKENS = 40
"""Tokens before the publication, whose longest gap is that of an answer without a swap."""


class _Service:
    """A router and one worker as processes, and a real publisher of weights in this one."""

    def __init__(self, cluster: InferenceCluster, publisher: Publisher) -> None:
        self._cluster = cluster
        self._publisher = publisher

    async def swap(self, tensors: list[NamedTensor]) -> tuple[float, float, float]:
        """Publish during a running answer; return the pause, that of tokens before it, and
        the time to the first token of the new version, in seconds."""
        call = await self._cluster.call([1, 2, 3], stream=True, max_tokens=4000, temperature=1.0)
        arrivals_s: list[float] = []
        publication: asyncio.Task[int] | None = None
        began_s = new_s = 0.0
        after = 0
        async for response in call:
            arrivals_s.append(time.monotonic())
            if publication is None and len(arrivals_s) == _WARM_TOKENS + _QUIET_TOKENS:
                began_s = time.monotonic()
                snapshot = Snapshot(step=self._publisher.version, tensors=tensors)
                publication = asyncio.create_task(self._publisher.publish(snapshot))
            versions = memoryview(response.tokens.weight_versions).cast("i")
            if publication is not None and publication.done():
                if publication.result() in versions:
                    new_s = new_s or arrivals_s[-1]
                    after += 1
                if after == _SETTLED_TOKENS:
                    break
        call.cancel()
        if not new_s:
            raise RuntimeError("the answer ended before a token of the new weights")
        gaps = [late - early for early, late in itertools.pairwise(arrivals_s[_WARM_TOKENS:])]
        median_s = statistics.median(gaps)
        quiet, swapped = gaps[: _QUIET_TOKENS - 1], gaps[_QUIET_TOKENS - 1 :]
        return max(swapped) - median_s, max(quiet) - median_s, new_s - began_s


async def swaps(folder: Path, etcd: EtcdServer, *, rounds: int) -> dict[str, float]:
    """Return pause and delay of swaps under a running answer of the tiny model."""
    shape = SHAPES["tiny"]
    shape.save_pretrained(folder / "model")
    coordinator = await Coordinator.connect(etcd.endpoint, cluster="swaps")
    cluster = InferenceCluster(folder, folder / "model", coordinator, etcd, "swaps")
    versions = PublishedVersions(kept=2)
    server = RpcServer(service="trainer", host="127.0.0.1", port=0, security=cluster.security)
    server.add_service(
        rpc.add_WeightServiceServicer_to_server,
        weights.WeightServicer(lambda: versions.weights),
        full_name=weights.FULL_NAME,
    )
    try:
        publisher = Publisher(coordinator, versions, source=await server.start(), floor=0)
        await publisher.publish(Snapshot(step=0, tensors=_model(0)))
        cluster.start("router")
        await cluster.registered("decode", cluster.start("both"))
        service = _Service(cluster, publisher)
        found = [await service.swap(_model(number)) for number in range(1, rounds + 2)][1:]
    finally:
        await cluster.stop()
        await server.stop(grace_s=0)
        await coordinator.close()
    pauses_s, quiet_s, delays_s = zip(*found, strict=True)
    return {
        "swap_pause_ms": statistics.median(pauses_s) * 1e3,
        "no_swap_pause_ms": statistics.median(quiet_s) * 1e3,
        "publish_to_sampled_p50_s": statistics.median(delays_s),
    }


def _model(seed: int) -> list[NamedTensor]:
    torch.manual_seed(seed)
    model: Any = AutoModelForCausalLM.from_config(SHAPES["tiny"], dtype=torch.bfloat16)
    state = model.state_dict()
    return [to_named(name, one) for name, one in state.items() if name != "lm_head.weight"]
