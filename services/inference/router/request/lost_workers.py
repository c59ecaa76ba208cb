"""Workers that were lost while they served one request. Pure.

A request that ends a worker's process (out of memory on a GPU, a bug in a kernel) would end the
next one, too. So the router gives up a request after it has lost `MOST` workers at one place of its
answer. Not here: which failures are a loss (`worker_calls`).
"""

from __future__ import annotations

from forge.core.errors import WorkersLost
from services.inference.router.fleet.workers import Worker

MOST = 3
"""Workers that a request may lose. One or two deaths are a host's or a kill's; other requests on a
lost worker count it, too, and rarely share the next ones with the same request."""
PROGRESS_TOKENS = 256
"""Tokens of the answer after which earlier losses do not count."""


class LostWorkers:
    """The workers that one request has lost since its answer last grew by `PROGRESS_TOKENS`."""

    def __init__(self) -> None:
        self._workers: list[Worker] = []
        self._at_token = 0

    def add(self, worker: Worker, *, at_token: int) -> None:
        """Count a lost worker, once; `at_token`: sampled tokens of the answer so far."""
        if at_token - self._at_token >= PROGRESS_TOKENS:
            self._workers.clear()
        self._at_token = at_token
        if worker not in self._workers:
            self._workers.append(worker)

    def check(self) -> None:
        """Raises WorkersLost when the request must not be placed again."""
        if len(self._workers) >= MOST:
            names = ", ".join(worker.instance_id for worker in self._workers)
            # Without the last error: gRPC's words would make a lost connection of this one.
            raise WorkersLost(
                f"{MOST} workers were lost while they served this request, at token "
                f"{self._at_token} of its answer; their logs have the cause: {names}"
            )
