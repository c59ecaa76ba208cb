"""A trainer of several ranks under torchrun, with a scheduler and a pool; each rank is killed."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import psutil
import pytest

from tests.support.runtime.waiting import until
from tests.support.scheduler.cluster import assert_counts_balance
from tests.support.trainer.process import START_S, ranks_of
from tests.support.trainer.stack import GROUPS_PER_STEP, Stack, until_finished

pytestmark = [pytest.mark.timeout(1200), pytest.mark.usefixtures("ended_ranks")]


@pytest.mark.parametrize(
    ("killed", "mesh"), [(0, "mesh__dp_shard"), (1, "mesh__dp_shard"), (1, "mesh__tp")]
)
async def test_killed_rank_restarts_all_from_the_checkpoint(
    stack: Stack, killed: int, mesh: str
) -> None:
    """Batches after the checkpoint are trained again, each group counts once, and no version of
    the weights is used twice. Both ranks publish weights, again after the restart; the kept model
    of a checkpoint comes from rank 0."""
    settings: dict[str, Any] = {
        "max_steps": 5,
        "checkpoint__every_steps": 2,
        mesh: 2,
        "publish_from": "ranks",
    }
    stack.trainer.start_torchrun(2, **settings)
    await stack.feed(0, 3 * GROUPS_PER_STEP)
    await stack.client.until_step(3)

    async def saved() -> bool:
        return (await stack.client.status()).checkpoint_step == 2

    await until(saved, limit_s=START_S)
    before = ranks_of(stack.trainer)
    os.kill(before[killed].pid, signal.SIGKILL)
    _, left = await asyncio.to_thread(psutil.wait_procs, list(before.values()), START_S)
    assert not left, "torchrun ends the other rank"

    await stack.feed(3 * GROUPS_PER_STEP, 2 * GROUPS_PER_STEP)
    status = await until_finished(stack.client)
    assert status.step == 5
    assert sorted((await stack.trained()).values()) == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert stack.trainer.logged("rewound")[-1]["step"] == 2
    assert stack.trainer.recorded_steps() == [1, 2, 3, 4, 5]
    assert_counts_balance(await stack.cluster.status())
    segments = [one["segments"] for one in stack.trainer.logged("weights_published")]
    assert set(segments) == {0, 2} and segments[0] == 2 and segments[-1] == 0
    assert 2 in segments[segments.index(0) :]


async def test_stopped_torchrun_saves_the_last_step(stack: Stack) -> None:
    """SIGTERM to torchrun drains rank 0, which saves a checkpoint together with the others."""
    settings = {"checkpoint__every_steps": 100, "mesh__dp_shard": 2}
    stack.trainer.start_torchrun(2, **settings)
    await stack.feed(0, GROUPS_PER_STEP)
    await stack.client.until_step(1)
    ranks = ranks_of(stack.trainer)
    stack.trainer.terminate()
    _, left = await asyncio.to_thread(psutil.wait_procs, list(ranks.values()), START_S)
    assert not left
    assert (stack.trainer.checkpoints / "step-00000001" / "state.json").is_file()
