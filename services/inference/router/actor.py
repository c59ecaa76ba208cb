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
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from forge.core.errors import ForgeError, ResourceExhausted, Unavailable
from forge.core.token_columns import TOKEN_BYTES
from forge.runtime.actors.actor import Actor
from forge.runtime.concurrency.tasks import cancel_and_wait
from forge.runtime.coordination import Discovery
from forge.runtime.telemetry import log
from forge.v1 import inference_pb2 as pb
from services.inference.router.fleet import Fleet, Worker
from services.inference.router.metrics import MOVED_REQUESTS, QUEUED_REQUESTS, SAMPLED_TOKENS
from services.inference.router.open_calls import Ping, is_silent, pause
from services.inference.router.versions import Versions

OVERCOMMIT = 1.25
"""Requests admitted per decode slot, since some are in prefill or between workers."""
MIN_ADMITTED = 16
_RATE_WINDOW_S = 10


@dataclass(slots=True, eq=False, kw_only=True)
class Admission:
    """A request's place: queued until `granted`, then admitted until it leaves."""

    granted: asyncio.Future[None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Admit:
    """Ask: queue the request. ResourceExhausted when too many wait. Leave must follow in any
    case."""

    admission: Admission = field(default_factory=Admission)


@dataclass(slots=True, eq=False, kw_only=True)
class Placement:
    """A worker that counts the request as load. Prefilled, Decoded, Failed or Abandoned must
    follow in any case."""

    chosen: Worker | None = None
    """None until the request is placed."""
    tokens: int = 0
    """Tokens counted as its load until the outcome."""

    @property
    def worker(self) -> Worker:
        """The chosen worker; only after the placement."""
        assert self.chosen is not None, "the request was placed"
        return self.chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacePrefill:
    """Ask: place a prefill. Unavailable without an available worker, TooOld while all have older
    weights than `floor`."""

    ids: bytes
    floor: int = 0
    """Newest version of the weights of the answer's tokens."""
    placement: Placement = field(default_factory=Placement)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefilled:
    """Tell: a prefill has succeeded."""

    placement: Placement
    ids: bytes
    cached_tokens: int
    prefill_s: float
    stored_tokens: int = 0
    stored_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceDecode:
    """Ask: place a decode. As PlacePrefill."""

    ids: bytes
    floor: int = 0
    placement: Placement = field(default_factory=Placement)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """Tell: a decode has finished; `ids` are prompt and answer."""

    placement: Placement
    ids: bytes
    decode_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """Tell: a placement failed. `dead`: the worker did not answer."""

    placement: Placement
    dead: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Abandoned:
    """Tell: the caller left before the outcome of a placement."""

    placement: Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """Tell: tokens were sampled for a caller."""

    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """Tell: the request has ended."""

    admission: Admission


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Ask: GetInferenceStatusResponse without the fields of the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetChanged:
    """Tell: discovery has changed."""


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
        version_wait_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._discoveries = tuple(discoveries)
        self._queue_limit = queue_limit
        self._ping = ping
        self._watches: set[asyncio.Task[None]] = set()
        """One of each worker that left discovery with requests."""
        self._clock = clock
        self._fleet = Fleet(versions=Versions(wait_s=version_wait_s))
        self._waiting: deque[Admission] = deque()
        self._admitted: set[Admission] = set()
        self._throughput = _Throughput()

    async def started(self) -> None:
        """Read the instances already known."""
        self._refresh()

    async def stopped(self) -> None:
        """Fail the waiting admissions."""
        await cancel_and_wait(*self._watches)
        # An error: a cancellation would look like the caller's own.
        for admission in self._waiting:
            if not admission.granted.done():
                admission.granted.set_exception(Unavailable("the router stopped"))

    async def receive(self, message: Any) -> Any:  # noqa: C901
        """Handle one message; see the module for their order."""
        match message:
            case Admit(admission=admission):
                return self._admit(admission)
            case PlacePrefill():
                # Without a decode worker a prefill would only hold memory.
                if not self._fleet.serves("decode", now_s=self._clock()):
                    raise Unavailable("no decode instance is available")
                return self._place("prefill", message)
            case PlaceDecode():
                return self._place("decode", message)
            case Prefilled():
                self._prefilled(message)
            case Decoded():
                self._decoded(message)
            case Failed(placement=placement, dead=dead):
                self._failed(placement, dead=dead)
            case Abandoned(placement=placement):
                if placement.chosen is not None:
                    self._release(placement)
            case Sampled(tokens=tokens):
                self._throughput.add(tokens, self._clock())
                SAMPLED_TOKENS.inc(tokens)
            case Leave(admission=admission):
                self._leave(admission)
            case FleetChanged():
                self._refresh()
            case Report():
                return self._report()
        return None

    def _admit(self, admission: Admission) -> Admission:
        # Callers that gave up have left the queue with Leave.
        if len(self._waiting) >= self._queue_limit:
            raise ResourceExhausted(
                f"{len(self._waiting)} requests are waiting, the most allowed", retry_after_s=1.0
            )
        self._waiting.append(admission)
        self._grant()
        return admission

    def _leave(self, admission: Admission) -> None:
        if admission in self._admitted:
            self._admitted.remove(admission)
        elif admission in self._waiting:
            self._waiting.remove(admission)
        self._grant()

    def _grant(self) -> None:
        # MIN_ADMITTED even without a decode worker: these requests report it to their callers.
        most = max(MIN_ADMITTED, round(self._fleet.capacity * OVERCOMMIT))
        while self._waiting and len(self._admitted) < most:
            admission = self._waiting.popleft()
            if not admission.granted.done():
                self._admitted.add(admission)
                admission.granted.set_result(None)
        QUEUED_REQUESTS.set(len(self._waiting))

    def _place(self, role: str, wanted: PlacePrefill | PlaceDecode) -> Placement:
        ids, placement = wanted.ids, wanted.placement
        worker = self._fleet.place(role, ids, now_s=self._clock(), floor=wanted.floor)
        prompt_tokens = len(ids) // TOKEN_BYTES
        uncached = max(1, prompt_tokens - worker.cached.match(ids).tokens)
        worker.running += 1
        worker.pending_tokens += uncached
        if role == "prefill":
            # Inserted now, so that concurrent requests of the same group follow.
            worker.cached.insert(ids)
        placement.chosen, placement.tokens = worker, uncached
        return placement

    def _prefilled(self, done: Prefilled) -> None:
        worker = self._release(done.placement)
        computed = len(done.ids) // TOKEN_BYTES - done.cached_tokens
        worker.rate.observe(seconds=done.prefill_s - done.stored_s, units=computed)
        self._fleet.store.observe(done.ids, tokens=done.stored_tokens, seconds=done.stored_s)
        worker.computed_tokens += computed
        worker.cached_tokens += done.cached_tokens

    def _decoded(self, done: Decoded) -> None:
        worker = self._release(done.placement)
        worker.rate.observe(seconds=done.decode_s, units=1)
        worker.cached.insert(done.ids)
        self._fleet.store.observe(done.ids)

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
        return worker

    def _refresh(self) -> None:
        announced = chain.from_iterable(each.instances for each in self._discoveries)
        try:
            gone = self._fleet.update(announced, now_s=self._clock())
        except (ValueError, ForgeError) as error:
            log.error("worker_metadata_unreadable", error=str(error))
            return
        for worker in gone:
            log.info("worker_gone", worker=worker.instance_id, role=worker.role)
            watch = asyncio.create_task(self._watch(worker))
            self._watches.add(watch)
            watch.add_done_callback(self._watches.discard)
        self._grant()

    async def _watch(self, worker: Worker) -> None:
        """Ping a worker that left discovery while it has requests; without an answer end them."""
        while worker.running or worker.calls:
            if await is_silent(self._ping, worker.address):
                log.warning("worker_lost", worker=worker.instance_id, calls=len(worker.calls))
                worker.calls.lose()
                return
            await pause()

    def _report(self) -> pb.GetInferenceStatusResponse:
        workers = [*self._fleet.of("prefill"), *self._fleet.of("decode")]
        return pb.GetInferenceStatusResponse(
            weight_version=min((worker.version for worker in workers), default=0),
            queued=len(self._waiting),
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
    )
