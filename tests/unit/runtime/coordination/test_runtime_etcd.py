"""Calls to an etcd that cannot be reached; no etcd."""

from __future__ import annotations

import asyncio
import random

from forge.runtime.coordination.etcd import Etcd
from forge.runtime.coordination.etcd_channel import open_channel
from tests.support.runtime.etcd import free_port

ATTEMPTS = 400
"""Without the check one cancellation of 15 was lost."""


async def test_renewal_that_fails_while_it_is_cancelled_stays_cancelled() -> None:
    """Otherwise the task that renews the lease would never end, and nor would its process."""
    endpoints = f"127.0.0.1:{free_port()}"
    etcd = Etcd(await open_channel(endpoints, None), endpoints=endpoints, cluster="test")
    ends = []
    for _ in range(ATTEMPTS):
        renewal = asyncio.create_task(etcd.renew(7, timeout_s=5))
        await asyncio.sleep(random.uniform(0, 0.002))
        if renewal.cancel():
            await asyncio.wait({renewal})
            ends.append(renewal.cancelled())
        else:
            assert renewal.exception() is not None
    await etcd.close()
    assert ends
    assert all(ends)
