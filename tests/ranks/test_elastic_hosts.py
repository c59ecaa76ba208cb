"""A trainer of a changing number of hosts, with a scheduler and a pool: docs/scaling.md."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.support.runtime.waiting import until
from tests.support.scheduler.cluster import assert_counts_balance
from tests.support.trainer.hosts import ADDRESSES, Hosts
from tests.support.trainer.stack import GROUPS_PER_STEP, Stack, until_finished

pytestmark = pytest.mark.timeout(1800)
STEPS = 6
START_S = 600.0
"""Until ranks have been lost, met again and loaded their model."""


@pytest_asyncio.fixture
async def hosts(
    stack: Stack, tmp_path: Path, request: pytest.FixtureRequest
) -> AsyncIterator[Hosts]:
    settings = stack.trainer.flags(
        mesh__dp_shard=0, max_steps=STEPS, checkpoint__every_steps=2, drain_s=60, seed=3
    )
    place = getattr(request, "param", "a directory")
    elastic = Hosts(
        tmp_path, settings, nodes=f"1:{len(ADDRESSES)}", directory=place == "a directory"
    )
    try:
        yield elastic
    finally:
        await elastic.stop()
        for host in range(len(ADDRESSES)):
            print(f"--- host {host}\n{elastic.said(host)}")  # pytest shows it beside a failure


async def test_group_continues_without_a_lost_host_and_grows_again(
    stack: Stack, hosts: Hosts
) -> None:
    """The shards follow the hosts: two, then one, from the checkpoint, then three, from a new
    checkpoint. Batches after the last checkpoint of a lost host are visible again, and each group
    counts once."""
    await hosts.start(1)
    await hosts.start(0)
    await stack.train_past_checkpoint(limit_s=START_S)
    assert shards(stack) == [2]
    await hosts.lose(1)
    await until(lambda: len(stack.trainer.logged("rewound")) == 2, limit_s=START_S)
    await stack.client.until_step(3)
    assert stack.trainer.logged("rewound")[-1]["step"] == 2

    for host in (1, 2):
        await hosts.start(host)
    await until(lambda: shards(stack)[-1] == 3, limit_s=START_S)
    await assert_finishes(stack)
    assert stack.trainer.logged("rewound")[-1]["step"] == 3, "ranks that grow lose no step"


@pytest.mark.parametrize(("hosts", "lost"), [("a directory", 0), ("host 0", 1)], indirect=["hosts"])
async def test_survivors_continue_with_a_host_that_joins_as_another_is_lost(
    stack: Stack, hosts: Hosts, lost: int
) -> None:
    """Two survivors and the new host, from the checkpoint. If hosts meet in a directory, the lost
    one may be that of rank 0: another one then leads."""
    for host in (2, 1, 0):
        await hosts.start(host)
    await until(lambda: shards(stack)[-1:] == [3], limit_s=START_S)
    await stack.train_past_checkpoint(limit_s=START_S)
    starts = len(shards(stack))
    await hosts.lose(lost)
    await hosts.start(3)

    async def grown() -> bool:
        for host in {1, 2, 3} - {lost}:
            if hosts.ended(host):  # without an error: systemd starts it again, too
                await hosts.start(host)
        return 3 in shards(stack)[starts:]

    await until(grown, limit_s=START_S)
    await stack.client.until_step(3)
    assert stack.trainer.logged("rewound")[-1]["step"] in (2, 3)
    await assert_finishes(stack)


async def assert_finishes(stack: Stack) -> None:
    """Train the steps after the third; each group counts once."""
    await stack.feed(3 * GROUPS_PER_STEP, (STEPS - 3) * GROUPS_PER_STEP)
    assert (await until_finished(stack.client)).step == STEPS
    found = await stack.trained()
    assert sorted(found.values()) == [n for n in range(1, STEPS + 1) for _ in range(2)]
    assert stack.trainer.recorded_steps() == [*range(1, STEPS + 1)]
    assert_counts_balance(await stack.cluster.status())


def shards(stack: Stack) -> list[int]:
    """Numbers of shards of the starts of several ranks."""
    return [one["dp_shard"] for one in stack.trainer.logged("ranks_started")]
