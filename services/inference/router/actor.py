"""The actor that owns the fleet: admits requests, places them, observes their outcome.

The messages of a request:

    Admit -> queued, granted when decode has room -> PlacePrefill -> Prefilled -> PlaceDecode
    -> Decoded | Failed (then PlacePrefill again) -> Leave

No message waits inside `receive`: an admission is a future. The caller creates the admission and
the placement, the actor fills them in: so a caller that leaves before the answer can still return
them.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from forge.core.errors import Unavailable
from forge.core.placement.chain_hashes import LastTurns, PromptChains
from forge.core.token_columns import TOKEN_BYTES
from forge.runtime.actors.actor import Actor
from forge.runtime.concurrency.tasks import cancel_and_wait
from forge.runtime.coordination import Discovery
from forge.runtime.telemetry import log
from forge.v1 import inference_pb2 as pb
from services.inference.router.admission_queue import AdmissionQueue
from services.inference.router.fleet.fleet import EXPECTED_S, Fleet
from services.inference.router.fleet.open_calls import Ping, is_silent, pause
from services.inference.router.fleet.workers import Worker
from services.inference.router.messages import (
    Abandoned,
    Admit,
    CacheReported,
    Decoded,
    Failed,
    FleetChanged,
    HoldChanged,
    Leave,
    PlaceDecode,
    Placement,
    PlacePrefill,
    Prefilled,
    Report,
    TokensSampled,
)
from services.inference.router.metrics import MOVED_REQUESTS, SAMPLED_TOKENS

_RATE_WINDOW_S = 10
_TURNS_BYTES = 32 << 20
"""Kept ids of sessions, 4 bytes each."""


@dataclass(slots=True)
class _Throughput:
    """Tokens per second over the last seconds."""

    total: int = 0
    _per_second: deque[tuple[int, int]] = field(default_factory=deque)

    def add(self, tokens: int, now_s: float) -> None:
        self.total += tokens
        second = int(now_s)
        if self._per_second and self._per_second[-1][0] == second:
            tokens += self._per_second.pop()[1]
        self._per_second.append((second, tokens))
        while self._per_second[0][0] < second - _RATE_WINDOW_S:
            self._per_second.popleft()

    def rate(self, now_s: float) -> float:
        since = int(now_s) - _RATE_WINDOW_S
        return sum(n for second, n in self._per_second if second >= since) / _RATE_WINDOW_S


class RouterActor(Actor):
    """Owns the fleet and the queue of requests."""

    mailbox_size = 65_536

    def __init__(
        self,
        discoveries: Iterable[Discovery],
        *,
        queue_limit: int,
        ping: Ping,
        fleet: Fleet | None = None,
        on_workers: Callable[[Iterable[Worker]], None] = lambda workers: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`fleet`: without workers; its fields are the rules of placement. `on_workers`: takes all
        workers after each change."""
        self._on_workers = on_workers
        self._discoveries = tuple(discoveries)
        self._ping = ping
        self._watches: set[asyncio.Task[None]] = set()
        """One of each worker that left discovery with requests."""
        self._clock = clock
        self._fleet = Fleet() if fleet is None else fleet
        self._queue = AdmissionQueue(
            limit=queue_limit, patience_s=self._fleet.patience_s, clock=clock
        )
        self._throughput = _Throughput()
        self._turns = LastTurns(most_bytes=_TURNS_BYTES)

    async def started(self) -> None:
        """Read the instances already known."""
        self._refresh()

    async def stopped(self) -> None:
        """Fail the waiting admissions."""
        await cancel_and_wait(*self._watches)
        self._queue.close()

    async def receive(self, message: Any) -> Any:
        """Handle one message; see the module for the order of a request's."""
        match message:
            case Admit(admission=admission, needs=needs):
                # Now, not at the end of the queue.
                with suppress(Unavailable):
                    self._fleet.check(needs, now_s=self._clock())
                self._queue.join(admission)
                return admission
            case PlacePrefill():
                # Without a worker that decodes a prefill would only hold memory.
                if not self._fleet.serves(now_s=self._clock()):
                    raise Unavailable("no decode instance is available")
                return self._place_prefill(message)
            case PlaceDecode():
                return self._place_decode(message)
            case Prefilled():
                self._prefilled(message)
            case Decoded():
                self._decoded(message)
            case Failed(placement=placement, dead=dead):
                self._failed(placement, dead=dead)
            case Abandoned(placement=placement):
                if placement.chosen is not None:
                    self._release(placement)
            case Leave(admission=admission):
                self._queue.leave(admission)
            case _:
                return self._observe(message)
        return None

    def _observe(self, message: Any) -> Any:
        """Messages about the fleet."""
        match message:
            case TokensSampled(tokens=tokens):
                self._throughput.add(tokens, self._clock())
                SAMPLED_TOKENS.inc(tokens)
            case FleetChanged():
                self._refresh()
            case HoldChanged(newest=newest):
                self._fleet.versions.newest_held = newest
            case CacheReported(worker=worker, change=change):
                worker.cached.report(stored=change.stored, removed=change.removed, anew=change.anew)
            case Report():
                return self._report()
        return None

    def _place_prefill(self, wanted: PlacePrefill) -> Placement:
        prompt, now_s = self._turns.prompt(wanted.ids, session=wanted.session), self._clock()
        worker = self._fleet.place_prefill(
            prompt,
            session=wanted.session,
            key=wanted.key,
            now_s=now_s,
            floor=wanted.floor,
            needs=wanted.needs,
        )
        tokens = len(wanted.ids) // TOKEN_BYTES
        placement = wanted.placement
        placement.prompt = prompt
        placement.tokens = max(1, tokens - worker.cached.tokens(prompt, now_s=now_s))
        # Expected now, so that concurrent requests of the same group follow.
        worker.cached.expect(prompt, until_s=now_s + EXPECTED_S)
        worker.cached.forget_expected(now_s=now_s)
        self._turns.keep(wanted.session, prompt)
        worker.pending_tokens += placement.tokens
        return self._occupy(worker, placement, wanted.session)

    def _place_decode(self, wanted: PlaceDecode) -> Placement:
        prompt, now_s = self._turns.prompt(wanted.ids, session=wanted.session), self._clock()
        worker = self._fleet.place_decode(
            prompt,
            session=wanted.session,
            now_s=now_s,
            floor=wanted.floor,
            read_by=wanted.read_by,
            early=wanted.early,
            needs=wanted.needs,
        )
        if wanted.early:
            # As in `_place_prefill`: it will be there.
            worker.cached.expect(prompt, until_s=now_s + EXPECTED_S)
        wanted.placement.prompt = prompt
        return self._occupy(worker, wanted.placement, wanted.session)

    def _occupy(self, worker: Worker, placement: Placement, session: str) -> Placement:
        worker.running += 1
        placement.chosen, placement.session = worker, session
        placement.beside = worker.running
        return placement

    def _prefilled(self, done: Prefilled) -> None:
        worker = self._release(done.placement)
        computed = len(done.ids) // TOKEN_BYTES - done.cached_tokens
        computed_s = done.prefill_s - done.stored_s
        costs, engine = self._fleet.costs, worker.engine.name
        costs.observe_prefill(engine, worker.times, seconds=computed_s, tokens=computed)
        costs.of(engine).store.observe(
            done.ids, version=worker.version, tokens=done.stored_tokens, seconds=done.stored_s
        )
        worker.computed_tokens += computed
        worker.cached_tokens += done.cached_tokens
        if done.decode is not None:
            done.decode.prompt = done.placement.prompt
            self._occupy(worker, done.decode, done.placement.session)

    def _decoded(self, done: Decoded) -> None:
        placement, now_s = done.placement, self._clock()
        beside = (placement.beside + placement.worker.running) / 2
        worker = self._release(placement)
        costs, engine = self._fleet.costs, worker.engine.name
        costs.observe_decode(
            engine, worker.times, seconds=done.decode_s, tokens=done.tokens, running=beside
        )
        costs.of(engine).transfer.observe(seconds=done.fetch_s, units=done.fetched_tokens)
        whole = PromptChains(done.ids, after=placement.prompt)
        worker.cached.expect(whole, until_s=now_s + EXPECTED_S)
        self._turns.keep(placement.session, whole)
        self._fleet.homes.rest(placement.session, now_s=now_s)
        costs.of(engine).store.observe(done.ids, version=worker.version)

    def _failed(self, placement: Placement, *, dead: bool) -> None:
        self._release(placement)
        MOVED_REQUESTS.inc()
        if dead:
            suspected = placement.worker.instance_id
            log.info("worker_suspected", worker=suspected)
            self._fleet.suspect(suspected, now_s=self._clock())

    def _release(self, placement: Placement) -> Worker:
        worker = placement.worker
        worker.running -= 1
        worker.pending_tokens -= placement.tokens
        placement.tokens = 0
        return worker

    def _refresh(self) -> None:
        announced = chain.from_iterable(each.instances for each in self._discoveries)
        for worker in self._fleet.update(announced, now_s=self._clock()):
            log.info("worker_gone", worker=worker.instance_id, role=worker.role)
            watch = asyncio.create_task(self._watch(worker))
            self._watches.add(watch)
            watch.add_done_callback(self._watches.discard)
        self._on_workers(self._fleet.workers.values())
        self._queue.resize(self._fleet.capacity)

    async def _watch(self, worker: Worker) -> None:
        """Ping a worker that left discovery while it has requests; without an answer end them."""
        while worker.running or worker.calls:
            if await is_silent(self._ping, worker.address):
                log.warning("worker_lost", worker=worker.instance_id, calls=len(worker.calls))
                worker.calls.lose()
                return
            await pause()

    def _report(self) -> pb.GetInferenceStatusResponse:
        workers = sorted(self._fleet.workers.values(), key=lambda worker: worker.samples)
        return pb.GetInferenceStatusResponse(
            weight_version=min((worker.version for worker in workers), default=0),
            queued=len(self._queue),
            sampled_tokens=self._throughput.total,
            sampled_tokens_per_s=self._throughput.rate(self._clock()),
            workers=[_status(worker) for worker in workers],
        )


def _status(worker: Worker) -> pb.WorkerStatus:
    waiting = max(0, worker.running - worker.capacity) if worker.capacity else 0
    return pb.WorkerStatus(
        instance_id=worker.instance_id,
        role=worker.role,
        weight_version=worker.version,
        running=worker.running - waiting,
        queued=waiting,
        computed_tokens=worker.computed_tokens,
        cached_tokens=worker.cached_tokens,
        draining=worker.draining,
        engine=worker.engine.name,
        reported_blocks=worker.cached.reported_blocks,
    )
