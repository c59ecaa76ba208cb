"""The fleet: load, rates and cached prefixes of each worker, as one router knows them.

Pure. Load and rates are from this router's own requests and answers: with several routers each sees
its share, and costs stay comparable. Caches are as the workers report them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf

from forge.core.errors import Unavailable
from forge.core.placement.cache_view import CacheView
from forge.core.placement.chains import PromptChains
from forge.core.placement.homes import Homes
from forge.core.placement.routing import Candidate, LearnedRate, LoadGuard, choose
from forge.core.placement.step_time import StepTime
from forge.core.token_columns import TOKEN_BYTES
from forge.runtime.coordination import Instance
from forge.runtime.serving_groups import role_of
from services.inference.router.metrics import OLDER_WEIGHTS, PLACED_PREFILLS
from services.inference.router.open_calls import OpenCalls
from services.inference.router.stored_prefixes import Store
from services.inference.router.versions import Versions, at_most

SUSPECT_S = 2.0
"""Time in which a worker that failed a call gets no request."""
_TRANSFER_S_PER_TOKEN = 20e-6
"""Guess of the transfer of one token's keys and values, until transfers have shown it."""
_PREFILL_S_PER_TOKEN = 1e-4
_STEP_S = 1e-3
_WEIGHT_OF_OTHERS = 4.0
"""Requests that a computation slows, per request that is there: more come until it is caught up.
Found by `benchmarks.routing`: less moves histories too often, more leaves workers idle."""
_PREFILL_GUARD = LoadGuard(ratio=2.0, slack_s=0.25)
"""Bounds the queue of a prefill worker. That queue slows no running answer, so the cost alone would
let it grow."""
EXPECTED_S = 60.0
"""Time for which a placed prompt counts as cached, if the worker does not report it."""


@dataclass(slots=True, eq=False)
class Times:
    """What work takes, of one worker or of all."""

    prefill: LearnedRate = field(
        default_factory=lambda: LearnedRate(_PREFILL_S_PER_TOKEN, memory_units=20_000.0)
    )
    """Seconds per computed token."""
    step: StepTime = field(default_factory=lambda: StepTime(each_s=_STEP_S))


@dataclass(slots=True, eq=False, kw_only=True)
class Worker:
    """One instance that prefills, decodes or does both."""

    instance_id: str
    role: str
    """prefill, decode or both."""
    address: str
    capacity: int
    """Requests it samples at the same time; 0 for prefill."""
    version: int
    cached: CacheView
    times: Times = field(default_factory=Times)
    running: int = 0
    """Unfinished placements."""
    pending_tokens: int = 0
    """Uncached prompt tokens of unfinished prefills."""
    computed_tokens: int = 0
    cached_tokens: int = 0
    suspect_until_s: float = 0.0
    stored_tokens: int = 0
    """Capacity of the KV store that it shares; 0: none."""
    reports_cache: bool = False
    calls: OpenCalls = field(default_factory=OpenCalls)

    @property
    def reads(self) -> bool:
        """Whether it prefills."""
        return self.role != "decode"

    @property
    def samples(self) -> bool:
        """Whether it decodes."""
        return self.role != "prefill"


@dataclass(slots=True)
class Fleet:
    """All workers in discovery."""

    workers: dict[str, Worker] = field(default_factory=dict)
    """By instance id, unique over all roles."""
    store: Store = field(default_factory=Store)
    versions: Versions = field(default_factory=lambda: Versions(wait_s=0.0))
    homes: Homes = field(default_factory=Homes)
    times: Times = field(default_factory=Times)
    """Of all workers, for those that have not been measured: a guess would draw or repel all."""
    local_prefill_tokens: int = 0
    """See the setting router.local_prefill_tokens."""
    answer_tokens: LearnedRate = field(
        default_factory=lambda: LearnedRate(64.0, memory_units=200.0)
    )
    """Tokens per answer."""
    transfer: LearnedRate = field(
        default_factory=lambda: LearnedRate(_TRANSFER_S_PER_TOKEN, memory_units=20_000.0)
    )
    """Seconds per token of keys and values that decode fetched."""

    def update(self, announced: Iterable[Instance], *, now_s: float) -> list[Worker]:
        """Apply a view of discovery; return the removed workers."""
        present = {one.instance_id: one for one in announced}
        gone = [
            worker
            for worker in self.workers.values()
            if worker.instance_id not in present
            or present[worker.instance_id].address != worker.address
        ]
        for worker in gone:
            del self.workers[worker.instance_id]
        for one in present.values():
            version = int(one.metadata.get("weight_version", 0))
            self.versions.seen(version, now_s=now_s)
            known = self.workers.get(one.instance_id)
            if known is None:
                self.workers[one.instance_id] = _new_worker(one, version)
            elif version != known.version:
                # The worker emptied its cache at the swap; one that reports says so itself.
                known.version = version
                known.cached.forget_guess()
                self.store.clear()
        self.store.hold(max((worker.stored_tokens for worker in self.readers), default=0))
        return gone

    @property
    def readers(self) -> list[Worker]:
        """The workers that prefill."""
        return [worker for worker in self.workers.values() if worker.reads]

    @property
    def samplers(self) -> list[Worker]:
        """The workers that decode."""
        return [worker for worker in self.workers.values() if worker.samples]

    @property
    def capacity(self) -> int:
        """Requests that all workers sample at the same time."""
        return sum(worker.capacity for worker in self.samplers)

    def place_prefill(
        self, prompt: PromptChains, *, session: str = "", now_s: float, floor: int = 0
    ) -> Worker:
        """Return the worker that is to read a prompt: one that also samples it, if it has most of
        the prompt cached or there is no prefill worker; else the cheapest prefill worker.

        `floor` is the newest version of the answer's tokens; see `versions`. Raises TooOld, and
        Unavailable without a worker.
        """
        sound, older = self._fitting(self.readers, "prefill", now_s=now_s, floor=floor)
        # Its first token would be newer than any worker that decodes.
        newest = max((one.version for one in self._sound(self.samplers, now_s)), default=floor)
        fitting = at_most(sound, newest)
        prefills = [worker for worker in fitting if worker.role == "prefill"]
        chosen = self._cheapest(
            [worker for worker in fitting if worker.samples], prompt, session=session, now_s=now_s
        )
        if prefills and (
            chosen is None or _uncached(chosen, prompt, now_s=now_s) > self.local_prefill_tokens
        ):
            chosen = self._cheapest(prefills, prompt, session="", now_s=now_s)
        assert chosen is not None
        OLDER_WEIGHTS.inc(older)
        PLACED_PREFILLS.labels("local" if chosen.samples else "prefill").inc()
        if chosen.samples:
            self.homes.settle(session, chosen.instance_id, now_s=now_s)
        return chosen

    def place_decode(
        self,
        prompt: PromptChains,
        *,
        session: str = "",
        now_s: float,
        floor: int = 0,
        read_by: Worker | None = None,
    ) -> Worker:
        """Return the worker that is to sample: the one that has read the prompt, if it can, else
        the cheapest. Raises as `place_prefill`."""
        fitting, older = self._fitting(self.samplers, "decode", now_s=now_s, floor=floor)
        if read_by is not None and read_by in fitting:
            chosen: Worker | None = read_by
        else:
            chosen = self._cheapest(fitting, prompt, session=session, now_s=now_s, has_read=True)
        assert chosen is not None
        OLDER_WEIGHTS.inc(older)
        self.homes.settle(session, chosen.instance_id, now_s=now_s)
        return chosen

    def observe_prefill(self, worker: Worker, *, seconds: float, tokens: int) -> None:
        """Learn from the computation of `tokens` of a prompt."""
        for times in (worker.times, self.times):
            times.prefill.observe(seconds=seconds, units=tokens)

    def observe_decode(
        self, worker: Worker, *, seconds: float, tokens: int, running: float
    ) -> None:
        """Learn from an answer of `tokens`, sampled beside `running` requests with itself."""
        if tokens:
            for times in (worker.times, self.times):
                times.step.observe(running=running, seconds=seconds / tokens)
            self.answer_tokens.observe(seconds=tokens, units=1)

    def _fitting(
        self, workers: Sequence[Worker], role: str, *, now_s: float, floor: int
    ) -> tuple[Sequence[Worker], bool]:
        sound = self._sound(workers, now_s)
        if not sound:
            raise Unavailable(f"no {role} instance is available")
        return self.versions.fitting(sound, floor=floor, now_s=now_s)

    def _cheapest(
        self,
        workers: Sequence[Worker],
        prompt: PromptChains,
        *,
        session: str,
        now_s: float,
        has_read: bool = False,
    ) -> Worker | None:
        """`has_read`: the prompt's keys and values come from a prefill worker."""
        self.homes.expire(now_s=now_s)
        candidates = [
            self._candidate(worker, prompt, session=session, now_s=now_s, has_read=has_read)
            for worker in workers
        ]
        chosen = choose(
            candidates,
            prompt_tokens=len(prompt.ids) // TOKEN_BYTES,
            stored_tokens=0 if has_read else self.store.tokens(prompt.ids),
            guard=_PREFILL_GUARD if all(one.role == "prefill" for one in workers) else None,
        )
        return None if chosen is None else self.workers[chosen.worker]

    def _candidate(
        self, worker: Worker, prompt: PromptChains, *, session: str, now_s: float, has_read: bool
    ) -> Candidate:
        """Return the routing cost of a prompt on a worker."""
        own, of_all = worker.times, self.times
        prefill_s = (own.prefill if own.prefill.is_known else of_all.prefill).seconds
        each_s = (own.step if own.step.is_known else of_all.step).each_s
        store_s = self.store.s_per_token
        beside, sampling_s = 0.0, 0.0
        if worker.samples:
            beside = self._busy_with(worker, session)
            sampling_s = each_s * self.answer_tokens.seconds
        return Candidate(
            worker=worker.instance_id,
            queue_delay_s=worker.pending_tokens * prefill_s + beside * sampling_s,
            cached_tokens=worker.cached.tokens(prompt, now_s=now_s),
            prefill_s_per_token=self.transfer.seconds if has_read else prefill_s,
            migration_s_per_token=store_s if worker.stored_tokens and not has_read else inf,
            sampling_s=sampling_s,
            slowed=_WEIGHT_OF_OTHERS * beside,
        )

    def _busy_with(self, worker: Worker, session: str) -> float:
        """Return the requests that a worker has beside one of a session: half those of this
        moment, half those that its live sessions have on average."""
        live = sum(self.homes.live(one.instance_id) for one in self.samplers)
        if not session or not live:
            return worker.running
        others = self.homes.live(worker.instance_id)
        if self.homes.home(session) == worker.instance_id:
            others -= 1
        active = min(1.0, sum(one.running for one in self.samplers) / live)
        return (worker.running + others * active) / 2

    def _sound(self, workers: Sequence[Worker], now_s: float) -> list[Worker]:
        return [worker for worker in workers if worker.suspect_until_s <= now_s]

    def serves(self, *, now_s: float) -> bool:
        """Whether a worker that decodes is available."""
        return bool(self._sound(self.samplers, now_s))

    def suspect(self, instance_id: str, *, now_s: float) -> None:
        """Avoid a worker after a failed call: it may be dead, with a lease that has not expired."""
        worker = self.workers.get(instance_id)
        if worker is not None:
            worker.suspect_until_s = now_s + SUSPECT_S
            worker.cached.forget_guess()


def _uncached(worker: Worker, prompt: PromptChains, *, now_s: float) -> int:
    return len(prompt.ids) // TOKEN_BYTES - worker.cached.tokens(prompt, now_s=now_s)


def _new_worker(one: Instance, version: int) -> Worker:
    role = one.metadata.get("role", role_of(one.kind))
    return Worker(
        instance_id=one.instance_id,
        role=role,
        address=one.address,
        capacity=0 if role == "prefill" else max(1, int(one.metadata.get("capacity", 1))),
        version=version,
        cached=CacheView(
            block_tokens=max(1, int(one.metadata.get("block_tokens", 16))),
            capacity_tokens=int(one.metadata.get("cache_tokens", 0)),
        ),
        stored_tokens=int(one.metadata.get("stored_tokens", 0)),
        reports_cache=one.metadata.get("cache_reports") == "1",
    )
