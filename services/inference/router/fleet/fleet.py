"""The fleet: load, rates and cached prefixes of each worker, as one router knows them.

Pure. Load and rates are from this router's own requests and answers: with several routers each sees
its share, and costs stay comparable. Caches are as the workers report them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf

from forge.core.errors import Unavailable
from forge.core.placement.chain_hashes import PromptChains
from forge.core.placement.home_workers import Homes
from forge.core.placement.routing import Candidate, LoadGuard, choose
from forge.core.token_columns import TOKEN_BYTES
from forge.runtime.coordination import Instance
from forge.runtime.process.drain import DRAINING_KEY
from services.inference.router.fleet.canary import Canary
from services.inference.router.fleet.costs import Costs
from services.inference.router.fleet.needs import (
    NO_NEEDS,
    Needs,
    able_of,
    engines_of,
    require_able,
    unchanging,
)
from services.inference.router.fleet.versions import Versions
from services.inference.router.fleet.workers import (
    Engine,
    Worker,
    engine_of,
    is_readable,
    new_worker,
    version_of,
)
from services.inference.router.metrics import (
    ENGINE_REQUESTS,
    OLDER_WEIGHTS,
    PLACED_PREFILLS,
)

SUSPECT_S = 2.0
"""Time in which a worker that failed a call gets no request."""
_WEIGHT_OF_OTHERS = 8.0
"""Requests that a computation slows, per request that is there: more come until it is caught up."""
_WEIGHT_OF_SAMPLING = 1 / 3
"""Part of an answer's sampling that counts: the others of a worker end soon, a computed prompt is
paid. Both are found by `benchmarks.routing`: less of the first, or more of the second, moves
histories and splits groups too often."""
_PREFILL_GUARD = LoadGuard(ratio=2.0, slack_s=0.25)
"""Bounds the queue of a prefill worker. That queue slows no running answer, so the cost alone would
let it grow."""
EXPECTED_S = 60.0
"""Time for which a placed prompt counts as cached, if the worker does not report it."""


@dataclass(slots=True)
class Fleet:
    """All workers in discovery."""

    workers: dict[str, Worker] = field(default_factory=dict)
    """By instance id, unique over all roles."""
    costs: Costs = field(default_factory=Costs)
    versions: Versions = field(default_factory=lambda: Versions(wait_s=0.0))
    homes: Homes = field(default_factory=Homes)
    local_prefill_tokens: int = 0
    """See the setting router.local_prefill_tokens."""
    canary: Canary = field(default_factory=Canary)
    patience_s: float = 0.0
    """Time for which a worker that has left may return; see the setting router.worker_wait_s."""
    _departed: dict[Engine, float] = field(default_factory=dict)
    """Engines of workers that have left, and until when they may return."""

    def update(self, announced: Iterable[Instance], *, now_s: float) -> list[Worker]:
        """Apply a view of discovery; return the removed workers. An unreadable entry is none."""
        present = {one.instance_id: one for one in announced if is_readable(one)}
        gone = [
            worker for name, worker in self.workers.items() if not _is(worker, present.get(name))
        ]
        for worker in gone:
            del self.workers[worker.instance_id]
            self._departed[worker.engine] = now_s + self.patience_s
        for one in present.values():
            version = version_of(one)
            self.versions.seen(version, now_s=now_s)
            known = self.workers.get(one.instance_id)
            if known is None:
                self.workers[one.instance_id] = new_worker(one)
                continue
            known.draining = DRAINING_KEY in one.metadata
            if version != known.version:
                # The worker emptied its cache at the swap; one that reports says so itself.
                known.version = version
                known.cached.forget_guess()
        self._hold_stores()
        return gone

    def _hold_stores(self) -> None:
        stored: dict[str, int] = {}
        for worker in self.readers:
            name = worker.engine.name
            stored[name] = max(stored.get(name, 0), worker.stored_tokens)
        for name, tokens in stored.items():
            self.costs.of(name).store.hold(tokens)

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

    def check(self, needs: Needs, *, now_s: float) -> None:
        """Raises as `require_able`, for the workers in discovery."""
        self._departed = {one: until for one, until in self._departed.items() if until > now_s}
        require_able(needs, engines_of(self.workers.values()), departed=self._departed)

    def place_prefill(
        self,
        prompt: PromptChains,
        *,
        session: str = "",
        key: str = "",
        now_s: float,
        floor: int = 0,
        needs: Needs = NO_NEEDS,
    ) -> Worker:
        """Return the worker that is to read a prompt: one that also samples it, if it has most of
        the prompt cached or there is no prefill worker; else the cheapest prefill worker.

        `floor` is the newest version of the answer's tokens; see `versions`. Raises as `check`,
        TooOld, and Unavailable without a worker.
        """
        self.check(needs, now_s=now_s)
        sound = self._sound(self.readers, needs, "prefill", now_s=now_s)
        takers = self._sound(self.samplers, needs, "decode", now_s=now_s)
        able, older = self.versions.fitting(_paired(sound, takers), floor=floor, now_s=now_s)
        fitting = self.canary.preferred(key, unchanging(needs, able))
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
        ENGINE_REQUESTS.labels(chosen.engine.name).inc()
        PLACED_PREFILLS.labels("local" if chosen.samples else "prefill").inc()
        if chosen.samples:
            self.homes.settle(session, chosen.instance_id, now_s=now_s)
        return chosen

    def place_decode(
        self,
        prompt: PromptChains,
        *,
        session: str,
        now_s: float,
        floor: int,
        read_by: Worker | None,
        early: bool,
        needs: Needs,
    ) -> Worker:
        """Return the worker that is to sample: the one that has read the prompt, if it can, else
        the cheapest that takes its keys and values, of its weights if there is one. Raises as
        `place_prefill`. `early`: see `PlaceDecode`."""
        self.check(needs, now_s=now_s)
        sound = self._sound(self.samplers, needs, "decode", now_s=now_s)
        if read_by is not None:
            sound = _takers(read_by, sound, early=early)
        fitting, older = self.versions.fitting(sound, floor=floor, now_s=now_s)
        if read_by is not None:
            # During a canary both versions have workers.
            fitting = [one for one in fitting if one.version == read_by.version] or fitting
        if read_by is not None and read_by in fitting:
            chosen: Worker | None = read_by
        else:
            chosen = self._cheapest(fitting, prompt, session=session, now_s=now_s, has_read=True)
        assert chosen is not None
        OLDER_WEIGHTS.inc(older)
        self.homes.settle(session, chosen.instance_id, now_s=now_s)
        return chosen

    def _sound(
        self, workers: Sequence[Worker], needs: Needs, role: str, *, now_s: float
    ) -> list[Worker]:
        """Return the workers that can serve a request now. Raises Unavailable without any."""
        sound = [one for one in able_of(needs, workers) if one.is_available(now_s)]
        if not sound:
            raise Unavailable(f"no {role} instance is available")
        return sound

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
        active = self._active() if session else None
        candidates = [
            self._candidate(
                worker,
                prompt,
                beside=self._beside(worker, session, active=active),
                now_s=now_s,
                has_read=has_read,
            )
            for worker in workers
        ]
        chosen = choose(
            candidates,
            prompt_tokens=len(prompt.ids) // TOKEN_BYTES,
            guard=_PREFILL_GUARD if all(one.role == "prefill" for one in workers) else None,
        )
        return None if chosen is None else self.workers[chosen.worker]

    def _candidate(
        self, worker: Worker, prompt: PromptChains, *, beside: float, now_s: float, has_read: bool
    ) -> Candidate:
        """Return the routing cost of a prompt on a worker that has `beside` requests."""
        engine, costs = worker.engine.name, self.costs
        store = costs.of(engine).store if worker.stored_tokens and not has_read else None
        prefill_s = costs.prefill_s(engine, worker.times)
        sampling_s = 0.0
        if worker.samples:
            answer_s = costs.each_s(engine, worker.times) * costs.answer_tokens.seconds
            sampling_s = _WEIGHT_OF_SAMPLING * answer_s
        return Candidate(
            worker=worker.instance_id,
            engine=engine,
            queue_delay_s=worker.pending_tokens * prefill_s + beside * sampling_s,
            cached_tokens=worker.cached.tokens(prompt, now_s=now_s),
            stored_tokens=store.tokens(prompt.ids, version=worker.version) if store else 0,
            prefill_s_per_token=costs.transfer_s(engine) if has_read else prefill_s,
            migration_s_per_token=store.s_per_token if store else inf,
            sampling_s=sampling_s,
            slowed=_WEIGHT_OF_OTHERS * beside,
        )

    def _active(self) -> float | None:
        """Return the requests for each live session, at most 1; None without such sessions."""
        samplers = self.samplers
        live = sum(self.homes.live(one.instance_id) for one in samplers)
        return min(1.0, sum(one.running for one in samplers) / live) if live else None

    def _beside(self, worker: Worker, session: str, *, active: float | None) -> float:
        """Return the requests that a worker samples beside one of a session: half those of this
        moment, half those that its live sessions have on average."""
        if not worker.samples:
            return 0.0
        if active is None:
            return worker.running
        others = self.homes.live(worker.instance_id)
        if self.homes.home(session) == worker.instance_id:
            others -= 1
        return (worker.running + others * active) / 2

    def serves(self, *, now_s: float) -> bool:
        """Whether a worker that decodes is available."""
        return any(one.is_available(now_s) for one in self.samplers)

    def suspect(self, instance_id: str, *, now_s: float) -> None:
        """Avoid a worker after a failed call: it may be dead, with a lease that has not expired."""
        worker = self.workers.get(instance_id)
        if worker is not None:
            worker.suspect_until_s = now_s + SUSPECT_S
            worker.cached.forget_guess()


def _uncached(worker: Worker, prompt: PromptChains, *, now_s: float) -> int:
    return len(prompt.ids) // TOKEN_BYTES - worker.cached.tokens(prompt, now_s=now_s)


def _is(worker: Worker, one: Instance | None) -> bool:
    """Whether a directory entry is still that of a worker, and of no successor."""
    return one is not None and one.address == worker.address and engine_of(one) is worker.engine


def _takers(reader: Worker, samplers: Sequence[Worker], *, early: bool) -> list[Worker]:
    """Return the workers that can sample what `reader` has read, or reads. Raises Unavailable
    without any."""
    fitting = {
        one
        for one in engines_of(samplers)
        if (one.takes_early_from if early else one.takes_from)(reader.engine)
    }
    found = [one for one in samplers if one is reader or one.engine in fitting]
    if not found:
        raise Unavailable(_no_taker([reader]))
    return found


def _paired(readers: Sequence[Worker], samplers: Sequence[Worker]) -> list[Worker]:
    """Return the readers whose prompts some worker can sample. Prefer those that are no newer than
    the newest such worker: else the second token would have older weights than the first. Raises
    Unavailable without any."""
    newest: dict[Engine, int] = {}
    for reads in engines_of(readers):
        fitting = {one for one in engines_of(samplers) if one.takes_from(reads)}
        newest[reads] = max((one.version for one in samplers if one.engine in fitting), default=-1)
    found = [one for one in readers if one.samples or newest[one.engine] >= 0]
    if not found:
        raise Unavailable(_no_taker(readers))
    timely = [one for one in found if one.samples or one.version <= newest[one.engine]]
    return timely or found


def _no_taker(readers: Sequence[Worker]) -> str:
    names = ", ".join(sorted({one.engine.name for one in readers}))
    return f"no decode instance takes the keys and values of prefill instances of {names}"
