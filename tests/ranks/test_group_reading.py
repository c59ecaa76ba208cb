"""Ranks that each read the groups of their data group, with a scheduler and a pool."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from math import prod
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file

from forge.runtime.security.issued_tokens import claims_for
from forge.runtime.security.tokens import Keyring
from forge.runtime.weights import WeightAnnouncement
from tests.support.rl.torchrun import torchrun
from tests.support.runtime.waiting import until
from tests.support.scheduler.cluster import assert_counts_balance
from tests.support.trainer.process import START_S, ranks_of
from tests.support.trainer.readings import MESHES
from tests.support.trainer.stack import GROUPS_PER_STEP, Stack, until_finished

pytestmark = pytest.mark.timeout(1800)
CASES = 6
LIMITS = {"fp64": 1e-10, "fp32": 2e-6}
"""Of loss and gradients, and of statistics, whose columns are float32."""


@pytest.fixture(scope="module", params=MESHES)
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """All cases of all meshes of that many ranks; four ranks read with a token of their own."""
    key = tmp_path_factory.mktemp("reading") / "key"
    keyring = Keyring.generate(key)
    if request.param == 4:
        key.with_suffix(".token").write_text(keyring.sign(claims_for("rank", "ranks")))
    return torchrun(request.param, "tests.support.trainer.readings", str(key), timeout_s=1500)


def test_batch_read_by_ranks_is_that_of_rank_0(found: dict[str, Any]) -> None:
    """Loss, every gradient, statistics, token values and rows of the table; unequal groups, fewer
    groups than data groups, mini-batches, credit over the batch, and trajectories in several
    trees."""
    for kind, limit in LIMITS.items():
        errors = {case: error for case, error in found.items() if f" {kind} " in case}
        assert len(errors) in [CASES * len(meshes) for meshes in MESHES.values()]
        assert not {case: error for case, error in errors.items() if not error <= limit}


def test_read_that_fails_on_a_rank_fails_on_rank_0(found: dict[str, Any]) -> None:
    """No rank waits for it: the error is that of the rank, and the next batch is read."""
    raised = {case: line for case, line in found.items() if isinstance(line, str)}
    away = [line for case, line in raised.items() if case.endswith("shard away")]
    erased = [line for case, line in raised.items() if case.endswith("erased")]
    assert len(away) == len(erased) > 0
    assert all(line.startswith("Unavailable") and "data group" in line for line in away), away
    expected = "Unreadable ['unequal groups-2:1:0']"
    assert all(line.startswith(expected) and "erased" in line for line in erased), erased


@pytest.mark.usefixtures("ended_ranks")
@pytest.mark.parametrize(
    "mesh", [{"mesh__dp_shard": 2}, {"mesh__dp_shard": 2, "mesh__tp": 2}], ids=["shards", "parts"]
)
async def test_killed_reader_costs_no_group(
    stack: Stack, tmp_path: Path, mesh: dict[str, int]
) -> None:
    """The ranks start again from the checkpoint and read its batches again; every group counts
    once. The rank reads with a token that allows nothing else. All ranks publish, too: together
    they send the tensors of the checkpoint, bit for bit."""
    token = tmp_path / "rank.token"
    token.write_text(stack.cluster.keyring.sign(claims_for("rank", "ranks")))
    settings: dict[str, Any] = {
        "max_steps": 5,
        "checkpoint__every_steps": 2,
        "read_from": "ranks",
        "publish_from": "ranks",
        "rank_token_file": token,
        **mesh,
    }
    ranks = prod(mesh.values())
    stack.trainer.start_torchrun(ranks, **settings)
    await stack.feed(0, 2 * GROUPS_PER_STEP)
    second = await announced(stack, step=2)

    async def saved() -> bool:
        return (await stack.client.status()).checkpoint_step == 2

    await until(saved, limit_s=START_S)
    assert len(second.segments) == ranks
    assert await sent_by_ranks(stack, second) == kept(stack.trainer.checkpoints / "step-00000002")

    await stack.feed(2 * GROUPS_PER_STEP, GROUPS_PER_STEP)
    third = await stack.client.until_step(3)
    assert (third.groups, third.trajectories) == (GROUPS_PER_STEP, 2 * GROUPS_PER_STEP)
    before = ranks_of(stack.trainer)
    os.kill(before[ranks - 1].pid, signal.SIGKILL)
    _, left = await asyncio.to_thread(psutil.wait_procs, list(before.values()), START_S)
    assert not left, "torchrun ends the other ranks"

    await stack.feed(3 * GROUPS_PER_STEP, 2 * GROUPS_PER_STEP)
    status = await until_finished(stack.client)
    assert status.step == 5
    assert sorted((await stack.trained()).values()) == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert stack.trainer.logged("rewound")[-1]["step"] == 2
    reader = ranks // 2
    assert [one["rank"] for one in stack.trainer.logged("rank_reads")] == [reader, reader]
    assert_counts_balance(await stack.cluster.status())


async def announced(stack: Stack, *, step: int) -> WeightAnnouncement:
    """The version of a step, once it is announced."""
    async with asyncio.timeout(START_S):
        async for manifest in stack.client.manifests():
            if manifest.get("step") == step:
                return WeightAnnouncement.decode(json.dumps(manifest).encode())
    raise AssertionError("the stream of manifests does not end")


async def sent_by_ranks(stack: Stack, announced: WeightAnnouncement) -> dict[str, bytes]:
    """The data of all tensors, each from the rank that sends it."""
    return {
        one.name: one.data
        for segment in announced.segments
        for one in await stack.client.fetch(
            segment.source, announced.weight_version, segment_from=segment.first
        )
    }


def kept(checkpoint: Path) -> dict[str, bytes]:
    """The data of all published tensors."""
    return {
        name: tensor.numpy().tobytes()
        for file in checkpoint.glob("model*.safetensors")
        for name, tensor in load_file(file).items()
    }


async def test_killed_child_reader_is_started_again(stack: Stack) -> None:
    """While the trainer waits for groups no step notices the lost rank: the next read does."""
    settings = {"max_steps": 2, "mesh__dp_shard": 2, "read_from": "ranks", "ranks": 2}
    stack.trainer.start(checkpoint__every_steps=1, **settings)
    await stack.feed(0, GROUPS_PER_STEP)
    await stack.client.until_step(1)
    assert stack.trainer.process is not None
    (pids, *_) = (one["pids"] for one in stack.trainer.logged("ranks_started"))
    os.kill(pids[0], signal.SIGKILL)
    await stack.feed(GROUPS_PER_STEP, GROUPS_PER_STEP)
    status = await until_finished(stack.client)
    assert status.step == 2
    assert sorted((await stack.trained()).values()) == [1, 1, 2, 2]
    assert_counts_balance(await stack.cluster.status())
    assert len(stack.trainer.logged("ranks_started")) == 2
