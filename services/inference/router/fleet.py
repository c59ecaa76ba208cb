"""The fleet: load, rate and cached prefixes of each worker, as one router knows them.

Pure. All figures are from this router's own requests and answers. With several routers each sees
its share, and costs stay comparable.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf

from forge.core.errors import Unavailable
from forge.core.placement.prefix_cache import PrefixCache
from forge.core.placement.routing import Candidate, LearnedRate, LoadGuard, choose
from forge.core.token_columns import TOKEN_BYTES
from forge.runtime.coordination import Instance
from forge.runtime.serving_groups import role_of
from services.inference.router.metrics import OLDER_WEIGHTS
from services.inference.router.open_calls import OpenCalls
from services.inference.router.versions import Versions, at_most

SUSPECT_S = 2.0
"""Time in which a worker that failed a call gets no request."""
_TRANSFER_S_PER_TOKEN = 20e-6
"""Transfer of one token's keys and values from prefill to decode; it only has to weigh locality."""
_STORE_S_PER_TOKEN = 5e-6
"""Guess of the time to read one token from a KV store, until reads have shown it."""
_STORE_BLOCK_TOKENS = 64
_STORE_INDEX_TOKENS = 4 << 20
"""Most tokens whose prefixes a router remembers as stored."""
_GUARD = LoadGuard(ratio=2.0, slack_s=0.25)


class Store:
    """The KV store that prefill workers share: what is in it, and how fast it is read."""

    def __init__(self) -> None:
        self._capacity_tokens = 0
        self._index = _store_index(0)
        self._rate = LearnedRate(_STORE_S_PER_TOKEN, memory_units=20_000.0)

    def hold(self, tokens: int) -> None:
        """Follow a store of this capacity; it keeps what it has."""
        if tokens != self._capacity_tokens:
            self._capacity_tokens = tokens
            self._index = _store_index(tokens)

    def observe(self, ids: bytes, *, tokens: int = 0, seconds: float = 0.0) -> None:
        """Note a prefix that a worker has written, and a read of `tokens` of it."""
        self._index.insert(ids)
        self._rate.observe(seconds=seconds, units=tokens)

    def clear(self) -> None:
        """Forget all prefixes: they are of earlier weights."""
        self._index.clear()

    def tokens(self, ids: bytes) -> int:
        """Return the stored tokens of a prompt."""
        return self._index.peek(ids)

    @property
    def s_per_token(self) -> float:
        """Seconds to read one token; infinite without a store."""
        return self._rate.seconds if self._index.capacity_blocks else inf


@dataclass(slots=True, kw_only=True)
class Worker:
    """One prefill or decode instance."""

    instance_id: str
    role: str
    address: str
    capacity: int
    """Requests it samples at the same time; 0 for prefill."""
    version: int
    cached: PrefixCache
    """Prefixes that this router's requests have cached there."""
    rate: LearnedRate
    """Prefill: seconds per computed token. Decode: seconds per request."""
    running: int = 0
    pending_tokens: int = 0
    """Prompt tokens of unfinished placements."""
    computed_tokens: int = 0
    cached_tokens: int = 0
    suspect_until_s: float = 0.0
    stored_tokens: int = 0
    """Capacity of the KV store that it shares; 0: none."""
    calls: OpenCalls = field(default_factory=OpenCalls)

    def candidate(self, ids: bytes, *, store: Store) -> Candidate:
        """Return the routing cost of `ids` on this worker."""
        cached = self.cached.peek(ids)
        if self.role == "prefill":
            return Candidate(
                worker=self.instance_id,
                queue_delay_s=self.pending_tokens * self.rate.seconds,
                cached_tokens=cached,
                prefill_s_per_token=self.rate.seconds,
                migration_s_per_token=store.s_per_token if self.stored_tokens else inf,
            )
        # Every request slows the others by its share; beyond the capacity it waits.
        return Candidate(
            worker=self.instance_id,
            queue_delay_s=self.running / self.capacity * self.rate.seconds,
            cached_tokens=cached,
            prefill_s_per_token=_TRANSFER_S_PER_TOKEN,
        )


@dataclass(slots=True)
class Fleet:
    """All workers in discovery."""

    workers: dict[str, Worker] = field(default_factory=dict)
    """By instance id, unique over both roles."""
    store: Store = field(default_factory=Store)
    versions: Versions = field(default_factory=lambda: Versions(wait_s=0.0))

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
                # The worker emptied its cache at the swap.
                known.version = version
                known.cached.clear()
                self.store.clear()
        self.store.hold(max((worker.stored_tokens for worker in self.of("prefill")), default=0))
        return gone

    def of(self, role: str) -> list[Worker]:
        """Return the workers of a role."""
        return [worker for worker in self.workers.values() if worker.role == role]

    @property
    def capacity(self) -> int:
        """Requests that all decode workers sample at the same time."""
        return sum(worker.capacity for worker in self.of("decode"))

    def place(self, role: str, ids: bytes, *, now_s: float, floor: int = 0) -> Worker:
        """Return the cheapest worker of a role for a prompt. Raises Unavailable without one.

        `floor` is the newest version of the answer's tokens; see `versions`. Raises TooOld.
        """
        fitting, older = self.versions.fitting(self._sound(role, now_s), floor=floor, now_s=now_s)
        if role == "prefill":
            # Its first token would be newer than any decode worker.
            newest = max((worker.version for worker in self._sound("decode", now_s)), default=floor)
            fitting = at_most(fitting, newest)
        workers = {worker.instance_id: worker for worker in fitting}
        chosen = choose(
            (worker.candidate(ids, store=self.store) for worker in workers.values()),
            prompt_tokens=len(ids) // TOKEN_BYTES,
            stored_tokens=self.store.tokens(ids) if role == "prefill" else 0,
            guard=_GUARD,
        )
        if chosen is None:
            raise Unavailable(f"no {role} instance is available")
        OLDER_WEIGHTS.inc(older)
        return workers[chosen.worker]

    def serves(self, role: str, *, now_s: float) -> bool:
        """Whether a worker of a role is available."""
        return bool(self._sound(role, now_s))

    def _sound(self, role: str, now_s: float) -> list[Worker]:
        return [worker for worker in self.of(role) if worker.suspect_until_s <= now_s]

    def suspect(self, instance_id: str, *, now_s: float) -> None:
        """Avoid a worker after a failed call: it may be dead, with a lease that has not expired."""
        worker = self.workers.get(instance_id)
        if worker is not None:
            worker.suspect_until_s = now_s + SUSPECT_S
            worker.cached.clear()


def _store_index(tokens: int) -> PrefixCache:
    most = min(tokens, _STORE_INDEX_TOKENS)
    return PrefixCache(block_tokens=_STORE_BLOCK_TOKENS, capacity_tokens=most)


def _new_worker(one: Instance, version: int) -> Worker:
    role = role_of(one.kind)
    initial_s, memory = (1e-4, 20_000.0) if role == "prefill" else (1.0, 200.0)
    return Worker(
        instance_id=one.instance_id,
        role=role,
        address=one.address,
        capacity=max(1, int(one.metadata.get("capacity", 1))) if role == "decode" else 0,
        version=version,
        cached=PrefixCache(
            block_tokens=max(1, int(one.metadata.get("block_tokens", 16))),
            capacity_tokens=int(one.metadata.get("cache_tokens", 0)),
        ),
        rate=LearnedRate(initial_s, memory_units=memory),
        stored_tokens=int(one.metadata.get("stored_tokens", 0)),
    )
