"""Drains one runner over the scheduler, and waits for its rollouts."""

from __future__ import annotations

import asyncio
import time

from forge.cli.connection import person
from forge.client.operator import Operator

_PAUSE_S = 0.5


async def drain_runner(
    operator: Operator, runner_id: str, *, resume: bool, wait_s: float
) -> int | None:
    """Set the drain of a runner; return the rollouts that still run after `wait_s`, None if a new
    leader does not know them yet.

    Raises `NotFound` for a runner that is not in discovery, `Unavailable`.
    """
    deadline_s = time.monotonic() + wait_s
    await operator.set_runner_draining(runner_id, not resume, on_behalf_of=person())
    while True:
        status = await operator.scheduler_status()
        found = [one.running for one in status.draining_runners if one.runner_id == runner_id]
        # A leader learns of earlier leases by their renewals.
        running = None if status.taking_over else sum(found)
        if resume or running == 0 or time.monotonic() >= deadline_s:
            return running
        await asyncio.sleep(_PAUSE_S)


def report(runner_id: str, running: int | None, *, resume: bool) -> str:
    """Returns the line for people."""
    if resume:
        return f"{runner_id}: gets rollouts again"
    if running is None:
        return f"{runner_id}: drained; a new scheduler leader does not know its rollouts yet"
    return f"{runner_id}: drained, {running} rollouts still run"
