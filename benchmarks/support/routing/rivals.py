"""Placements for the routing simulation: the real router, and the rules it is compared with."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from hashlib import blake2b
from types import SimpleNamespace
from typing import Any

from benchmarks.support.routing.worker import BLOCK_TOKENS, Request
from forge.runtime.coordination import Instance
from services.inference.engines.base import CacheChange
from services.inference.router.actor import RouterActor
from services.inference.router.messages import (
    CacheReported,
    Decoded,
    Failed,
    FleetChanged,
    Placement,
    PlacePrefill,
    Prefilled,
)


class Rule:
    """A rule that observes nothing but its own open requests."""

    def __init__(self, workers: int) -> None:
        self.workers = list(range(workers))
        """Those that are not lost."""
        self.open = [0] * workers
        self._places: dict[Request, int] = {}

    def rule(self, request: Request) -> int:
        """Return the worker of a request."""
        raise NotImplementedError

    def choose(self, request: Request, now_s: float) -> int:
        """See `Placement`."""
        worker = self._places[request] = self.rule(request)
        self.open[worker] += 1
        return worker

    def prefilled(self, request: Request, now_s: float) -> None:
        """Nothing."""

    def finished(self, request: Request, now_s: float, ids: bytes) -> None:
        """Count it no longer."""
        self.open[self._places.pop(request)] -= 1

    def reported(
        self, worker: int, stored: list[bytes], removed: list[bytes], anew: bool, now_s: float
    ) -> None:
        """Nothing."""

    def swapped(self, worker: int, version: int, now_s: float) -> None:
        """Nothing."""

    def lost(self, worker: int, requests: Sequence[Request], now_s: float) -> None:
        """Choose it no longer."""
        self.workers.remove(worker)
        for request in requests:
            del self._places[request]


class RoundRobin(Rule):
    """One worker after the other."""

    _next = 0

    def rule(self, request: Request) -> int:
        """Return the next worker."""
        self._next += 1
        return self.workers[self._next % len(self.workers)]


class FewestRequests(Rule):
    """The worker with the fewest open requests."""

    def rule(self, request: Request) -> int:
        """Return the idlest worker."""
        return min(self.workers, key=lambda worker: self.open[worker])


class HashOfGroup(Rule):
    """All requests of a group on one worker."""

    def rule(self, request: Request) -> int:
        """Return the group's worker."""
        return _hash(request.rollout.group, self.workers)


class HashOfSession(Rule):
    """All requests of a session on one worker."""

    def rule(self, request: Request) -> int:
        """Return the session's worker."""
        return _hash(request.session, self.workers)


def _hash(name: str, workers: Sequence[int]) -> int:
    """Rendezvous hashing: without a worker, only its names have another."""
    return max(workers, key=lambda worker: blake2b(f"{name} {worker}".encode()).digest())


class Router:
    """The real router actor, with a discovery and a clock of the simulation."""

    def __init__(self, workers: int) -> None:
        self._now_s = 0.0
        self._versions = [1] * workers
        self._lost: set[int] = set()
        self._discovery = SimpleNamespace(kind="decode", instances=())
        self._workers: dict[str, Any] = {}
        self._places: dict[Request, Placement] = {}

        def keep(found: Any) -> None:
            self._workers = {worker.instance_id: worker for worker in found}

        async def ping(address: str) -> None: ...

        discoveries: Any = [self._discovery]
        self._actor = RouterActor(
            discoveries, queue_limit=1, ping=ping, on_workers=keep, clock=lambda: self._now_s
        )
        self._announce()
        _ended(self._actor.started())

    def choose(self, request: Request, now_s: float) -> int:
        """See `Placement`."""
        placed = self._ask(PlacePrefill(ids=request.ids, session=request.session), now_s)
        self._places[request] = placed
        return int(placed.worker.instance_id)

    def prefilled(self, request: Request, now_s: float) -> None:
        """See `Placement`."""
        read = self._places[request]
        decode = self._places[request] = Placement(chosen=read.worker)
        done = Prefilled(
            placement=read,
            ids=request.ids,
            cached_tokens=request.cached,
            prefill_s=request.compute_s,
            decode=decode,
        )
        self._ask(done, now_s)

    def finished(self, request: Request, now_s: float, ids: bytes) -> None:
        """See `Placement`."""
        done = Decoded(
            placement=self._places.pop(request),
            ids=ids,
            decode_s=now_s - request.began_s,
            tokens=request.sampled - 1,
        )
        self._ask(done, now_s)

    def reported(
        self, worker: int, stored: list[bytes], removed: list[bytes], anew: bool, now_s: float
    ) -> None:
        """See `Placement`."""
        if worker in self._lost:
            return
        change = CacheChange(stored=stored, removed=removed, anew=anew)
        self._ask(CacheReported(worker=self._workers[str(worker)], change=change), now_s)

    def swapped(self, worker: int, version: int, now_s: float) -> None:
        """See `Placement`."""
        self._versions[worker] = version
        self._announce()
        self._ask(FleetChanged(), now_s)

    def lost(self, worker: int, requests: Sequence[Request], now_s: float) -> None:
        """See `Placement`."""
        for request in requests:
            self._ask(Failed(placement=self._places.pop(request), dead=True), now_s)
        self._lost.add(worker)
        self._announce()
        self._now_s = now_s
        # The actor starts a task, which ends at once: the worker has no request.
        asyncio.run(self._actor.receive(FleetChanged()))

    def _announce(self) -> None:
        self._discovery.instances = tuple(
            Instance(
                instance_id=str(worker),
                kind="decode",
                revision=1,
                address=f"{worker}:1",
                metadata={
                    "role": "both",
                    "weight_version": str(version),
                    "block_tokens": str(BLOCK_TOKENS),
                    "cache_reports": "1",
                    "capacity": "128",
                },
            )
            for worker, version in enumerate(self._versions)
            if worker not in self._lost
        )

    def _ask(self, message: object, now_s: float) -> Any:
        self._now_s = now_s
        return _ended(self._actor.receive(message))


def _ended(receive: Coroutine[Any, Any, Any]) -> Any:
    """Return the result of a coroutine that waits for nothing."""
    try:
        receive.send(None)
    except StopIteration as end:
        return end.value
    raise RuntimeError("the router actor waited")
