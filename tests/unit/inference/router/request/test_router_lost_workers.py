"""A request that ends its workers: it loses three of them, not the whole fleet. Real gRPC; a worker
is lost by a cut connection."""

from __future__ import annotations

import pytest

from forge.core.errors import WorkersLost
from forge.v1.common_pb2 import FINISH_REASON_LENGTH
from services.inference.router.request.lost_workers import MOST, PROGRESS_TOKENS, LostWorkers
from tests.support.inference.both_workers import Cluster, cluster
from tests.support.inference.router import Harness, announced
from tests.support.runtime.waiting import until

both_ways = pytest.mark.parametrize("streams", [False, True], ids=["rpc", "stream"])


def suspects(served: Cluster) -> list[str]:
    """Workers that the router avoids, for one reason or another."""
    return [one.instance_id for one in served.harness.workers if one.suspect_until_s > 0]


@both_ways
async def test_request_that_ends_every_worker_ends_three(streams: bool) -> None:
    """Each is lost while it computes the prompt; the fourth and fifth never get it. The error names
    the lost ones, and no caller repeats the request."""
    async with cluster(streams=streams, workers=5) as served:

        def die() -> None:
            for network in served.networks:
                network.cut_all()

        served.engine.on_prefill = die
        with pytest.raises(WorkersLost) as caught:
            await served.answer()
        assert served.engine.calls.count("prefill") == MOST
        await until(served.is_idle)
        lost = suspects(served)
        assert len(lost) == MOST
        assert all(name in str(caught.value) for name in lost)
        assert not caught.value.retryable
        served.engine.on_prefill = lambda: None
        assert await served.answer() == ([4, 5, 6, 7, 8], FINISH_REASON_LENGTH)


@both_ways
async def test_workers_that_were_dead_before_are_not_counted(streams: bool) -> None:
    """Four refuse the connection, with leases that have not expired: the request has ended none of
    them, and the fifth answers."""
    async with cluster(streams=streams, workers=5) as served:
        for network in served.networks[:-1]:
            await network.close()
        assert await served.answer() == ([4, 5, 6, 7, 8], FINISH_REASON_LENGTH)
        assert len(suspects(served)) >= MOST


def test_losses_count_at_one_place_of_the_answer() -> None:
    """One worker counts once; after enough new tokens the count begins again."""
    workers = Harness(*(announced(f"d{n}", "decode") for n in range(6)))
    workers.actor._refresh()
    lost = LostWorkers()
    for _ in range(MOST):
        lost.add(workers.workers[0], at_token=0)
    lost.add(workers.workers[1], at_token=PROGRESS_TOKENS - 1)
    lost.check()
    lost.add(workers.workers[2], at_token=2 * PROGRESS_TOKENS - 1)
    lost.add(workers.workers[3], at_token=2 * PROGRESS_TOKENS)
    lost.check()
    lost.add(workers.workers[4], at_token=2 * PROGRESS_TOKENS + 9)
    with pytest.raises(WorkersLost, match=r"token 521 of its answer.*: d2, d3, d4"):
        lost.check()
