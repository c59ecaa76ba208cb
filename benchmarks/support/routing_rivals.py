"""Placements for the routing simulation: the real router, and the rules it is compared with."""

from __future__ import annotations

from collections.abc import Coroutine
from hashlib import blake2b
from types import SimpleNamespace
from typing import Any

from benchmarks.support.routing_simulation import BLOCK_TOKENS, Request
from forge.runtime.coordination import Instance
from services.inference.engines.base import CacheChange
from services.inference.router.actor import RouterActor
from services.inference.router.messages import (
    CacheReported,
    Decoded,
    FleetChanged,
    PlaceDecode,
    Placement,
    PlacePrefill,
    Prefilled,
)


class Rule:
    """A rule that observes nothing but its own open requests."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
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


class RoundRobin(Rule):
    """One worker after the other."""

    _next = 0

    def rule(self, request: Request) -> int:
        """Return the next worker."""
        self._next += 1
        return self._next % self.workers


class FewestRequests(Rule):
    """The worker with the fewest open requests."""

    def rule(self, request: Request) -> int:
        """Return the idlest worker."""
        return min(range(self.workers), key=lambda worker: self.open[worker])


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


def _hash(name: str, workers: int) -> int:
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "big") % workers


class Router:
    """The real router actor, with a discovery and a clock of the simulation."""

    def __init__(self, workers: int) -> None:
        self._now_s = 0.0
        self._versions = [1] * workers
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
        done = Prefilled(
            placement=read,
            ids=request.ids,
            cached_tokens=request.cached,
            prefill_s=request.compute_s,
        )
        self._ask(done, now_s)
        decode = PlaceDecode(ids=request.ids, session=request.session, read_by=read.worker)
        self._places[request] = self._ask(decode, now_s)

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
        change = CacheChange(stored=stored, removed=removed, anew=anew)
        self._ask(CacheReported(worker=self._workers[str(worker)], change=change), now_s)

    def swapped(self, worker: int, version: int, now_s: float) -> None:
        """See `Placement`."""
        self._versions[worker] = version
        self._announce()
        self._ask(FleetChanged(), now_s)

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
