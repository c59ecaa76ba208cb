"""A canary of another engine in a run: vLLM beside the embedded engine, compared on /metrics.

Runs by `make test-engines`, in the environment of the services; the worker of vLLM runs in its own.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from forge.cli.connection import of_run
from tests.support.runtime.scraped import by_label, scraped
from tests.support.suite.forge_run import ForgeRun
from tests.support.suite.second_worker import second_worker

pytestmark = [
    pytest.mark.skipif(
        os.environ.get("FORGE_ENGINES") != "vllm" or find_spec("lmdb") is None,
        reason="runs by `make test-engines`, with all services",
    ),
    pytest.mark.timeout(1800),
]
VLLM_PYTHON = ".venv-vllm/bin/python"
BOTH = {"embedded", "vllm"}
RUN = (
    "--no-console",
    *("--set", "scheduler.queue.concurrency=16", "--set", "scheduler.queue.batch_groups=4"),
    *("--set", "router.router.canary_engine=vllm", "--set", "router.router.canary_share=0.5"),
    # The policy does not move: all that remains of a gap is the engine's.
    *("--set", "trainer.optimizer.learning_rate=0"),
)
MOST_GAP = 1e-4
"""Mean difference of log-probs between engine and trainer, in float32."""


async def metadata_of(run: ForgeRun, kind: str) -> Mapping[str, str]:
    """The directory entry of a service."""
    async with of_run(run.directory).open() as (coordinator, _):
        (instance, *_) = await coordinator.discover(kind).wait(timeout_s=60)
        return instance.metadata


def test_canary_of_another_engine_is_compared_on_metrics(tmp_path: Path, forge_root: Path) -> None:
    """Both engines sample trajectories of one batch: the trainer shows gap and reward of each, and
    in float32 neither differs from the trainer. With the canary's worker killed the run continues,
    and its values are gone."""
    run = ForgeRun(tmp_path / "run", root=forge_root, steps=1000, extra=RUN)
    run.start()
    run.wait_for_step(1)
    trainer, router = (asyncio.run(metadata_of(run, kind)) for kind in ("trainer", "router"))

    def shown(name: str) -> dict[str, float]:
        return by_label(scraped(trainer), f"forge_trainer_engine_{name}", "engine")

    def compared() -> bool:
        values = [shown(name) for name in ("trajectories", "trained_tokens")]
        counts = all(one.get(engine) for one in values for engine in BOTH)
        return counts and shown("mean_reward").keys() >= BOTH

    def recorded() -> list[dict[str, Any]]:
        """The batches of both engines."""
        found: list[Any] = [line["engines"] for line in run.metrics()]
        return [one for one in found if one.keys() >= BOTH]

    with second_worker(run, "--engine=vllm", python=VLLM_PYTHON):
        run.wait_until(compared, "batch of both engines")
        run.wait_until(lambda: bool(recorded()), "record of this batch")
        counted = by_label(scraped(router), "forge_inference_engine_requests_total", "engine")
    run.wait_until(lambda: "vllm" not in shown("trajectories"), "batch without the canary")
    assert run.interrupt() == 130, run.explain()
    assert counted.keys() == BOTH
    for engines in recorded():
        for name in BOTH:
            assert engines[name]["logprob_gap_mean"] < MOST_GAP, engines
