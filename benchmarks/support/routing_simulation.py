"""Workers of the role both in virtual time, and the traffic of groups of multi-turn rollouts.

Owns the simulated engine: passes, steps and a real prefix cache, at the measured costs of the
embedded engine. The placement under test comes from outside. Not here: the network, which costs all
placements the same.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count
from random import Random
from typing import Protocol

from forge.core.placement.prefix_cache import PrefixCache
from forge.core.token_columns import TOKEN_BYTES, int32_bytes

BLOCK_TOKENS = 16
PASS_TOKENS = 512
REPORT_DELAY_S = 0.02
"""From a change of a cache until the router knows."""
SWAP_STAGGER_S = 0.05
"""Between the swaps of two workers after a publication."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCosts:
    """Seconds of the embedded engine on one core."""

    pass_s: float
    """Of a prefill pass, beside its tokens."""
    token_s: float
    """Per computed token."""
    context_s: float
    """Per computed token and token before it."""
    step_s: float
    """Of a decode step, beside its requests."""
    row_s: float
    """Per running request."""
    kv_s: float
    """Per token of context that a step reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One request of a session."""

    new_tokens: int
    """Tokens after the answer before; of the first turn: all that its group does not share."""
    answer_tokens: int
    pause_s: float
    """From the answer before to this request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One session."""

    group: str
    session: str
    common_tokens: int
    """First tokens that all groups share."""
    group_tokens: int
    """Tokens after them that its group shares."""
    turns: tuple[Turn, ...]


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """One turn on its way."""

    rollout: Rollout
    turn: int
    ids: bytes
    arrived_s: float = 0.0
    cached: int = 0
    left: int = 0
    compute_s: float = 0.0
    source: Request | None = None
    version: int = 0
    sampled: int = 0
    began_s: float = 0.0

    @property
    def tokens(self) -> int:
        """Length of the prompt."""
        return len(self.ids) // TOKEN_BYTES

    @property
    def session(self) -> str:
        """The session."""
        return self.rollout.session


class Placement(Protocol):
    """Chooses workers, and observes what comes of it."""

    def choose(self, request: Request, now_s: float) -> int:
        """Return the worker of a request."""

    def prefilled(self, request: Request, now_s: float) -> None:
        """Observe the end of a prefill."""

    def finished(self, request: Request, now_s: float, ids: bytes) -> None:
        """Observe the end of an answer; `ids` are prompt and answer."""

    def reported(
        self, worker: int, stored: list[bytes], removed: list[bytes], anew: bool, now_s: float
    ) -> None:
        """Observe a change of a cache."""

    def swapped(self, worker: int, version: int, now_s: float) -> None:
        """Observe the announcement of new weights."""


@dataclass(slots=True)
class _Changes:
    """Listener of one cache."""

    stored_: list[bytes] = field(default_factory=list)
    removed_: list[bytes] = field(default_factory=list)
    anew: bool = False

    def stored(self, chains: list[bytes]) -> None:
        self.stored_ += chains

    def removed(self, chain: bytes) -> None:
        self.removed_.append(chain)

    def cleared(self) -> None:
        self.stored_, self.removed_, self.anew = [], [], True


class _Worker:
    """The engine of one worker."""

    def __init__(self, costs: EngineCosts, cache_tokens: int) -> None:
        self.changes = _Changes()
        self.cache = PrefixCache(
            block_tokens=BLOCK_TOKENS, capacity_tokens=cache_tokens, listener=self.changes
        )
        self.version = 1
        self.pending: deque[Request] = deque()
        self.running: list[Request] = []
        self.is_busy = False
        self.busy_s = 0.0
        self._costs = costs

    def join(self, request: Request) -> None:
        limit = request.tokens - 1
        request.cached = self.cache.match(request.ids, limit_tokens=limit).tokens
        shared, source = 0, None
        for other in self.pending:
            same = _common_blocks(other.ids, request.ids, limit)
            if same > shared:
                shared, source = same, other
        if source is not None and shared > request.cached:
            request.cached, request.source = shared, source
        request.left = request.tokens - request.cached
        request.version = self.version
        self.pending.append(request)

    def plan(self) -> tuple[float, list[tuple[Request, int]]]:
        """Return the time of the next pass and step, and the tokens of the pass."""
        costs, spans = self._costs, list[tuple[Request, int]]()
        took_s, room = 0.0, PASS_TOKENS
        ready = [one for one in self.pending if one.source is None or one.source.left == 0]
        if ready:
            oldest, *others = ready
            others.sort(key=lambda one: one.left)
            for one in (oldest, *others):
                most = room if one is not oldest or not others else (room + 1) // 2
                tokens = min(one.left, most)
                if tokens:
                    spans.append((one, tokens))
                    room -= tokens
            took_s += costs.pass_s
            for one, tokens in spans:
                context = one.tokens - one.left + tokens / 2
                own_s = tokens * (costs.token_s + costs.context_s * context)
                one.compute_s += own_s + costs.pass_s * tokens / (PASS_TOKENS - room)
                took_s += own_s
        if self.running:
            kv = sum(one.tokens + one.sampled for one in self.running)
            took_s += costs.step_s + costs.row_s * len(self.running) + costs.kv_s * kv
        return took_s, spans


def _common_blocks(a: bytes, b: bytes, limit: int) -> int:
    size = BLOCK_TOKENS * TOKEN_BYTES
    blocks = 0
    most = min(len(a), len(b), limit * TOKEN_BYTES) // size
    while (
        blocks < most
        and a[blocks * size : (blocks + 1) * size] == b[blocks * size : (blocks + 1) * size]
    ):
        blocks += 1
    return blocks * BLOCK_TOKENS


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What one run came to."""

    completion_s: float = 0.0
    """Until the last answer of the last group."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0
    """Prompt tokens that no earlier turn of the session had, nor another member of its group."""
    turn_s: list[float] = field(default_factory=list)
    busy_share: float = 0.0

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens that were not computed."""
        return self.cached_tokens / self.prompt_tokens

    @property
    def computed_over_new(self) -> float:
        """Computed prompt tokens per new one."""
        return (self.prompt_tokens - self.cached_tokens) / self.new_tokens


class Simulation:
    """Runs groups over workers: `concurrency` of them at once, in order."""

    def __init__(
        self,
        groups: Sequence[Sequence[Rollout]],
        placement: Placement,
        costs: EngineCosts,
        *,
        workers: int = 4,
        concurrency: int = 16,
        cache_tokens: int = 200_000,
        publish_every_s: float = 0.0,
        seed: int = 0,
    ) -> None:
        self._waiting = deque(groups)
        self._placement = placement
        self._workers = [_Worker(costs, cache_tokens) for _ in range(workers)]
        self._concurrency = concurrency
        self._publish_every_s = publish_every_s
        self._random = Random(seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._now_s = 0.0
        self._left: dict[str, int] = {}
        self._seen: set[str] = set()
        self._version = 1
        self._outcome = Outcome()

    def run(self) -> Outcome:
        """Run to the end."""
        for worker in range(len(self._workers)):
            self._report(worker, first=True)
        for _ in range(self._concurrency):
            self._start_group()
        if self._publish_every_s:
            self._at(self._publish_every_s, self._publish)
        while self._left or self._waiting:
            self._now_s, _, act = heapq.heappop(self._events)
            act()
        busy_s = sum(worker.busy_s for worker in self._workers)
        self._outcome.busy_share = busy_s / len(self._workers) / self._outcome.completion_s
        return self._outcome

    def _at(self, delay_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self._now_s + delay_s, next(self._order), act))

    def _start_group(self) -> None:
        if not self._waiting:
            return
        group = self._waiting.popleft()
        self._left[group[0].group] = len(group)
        for rollout in group:
            history = _ids(rollout)
            delay_s = rollout.turns[0].pause_s + self._random.random() * 0.05
            self._at(delay_s, lambda r=rollout, h=history: self._ask(r, 0, h))  # type: ignore[misc]

    def _ask(self, rollout: Rollout, turn: int, history: bytes) -> None:
        new = rollout.turns[turn].new_tokens
        ids = history + _own(rollout.session, turn, "prompt", new)
        request = Request(rollout=rollout, turn=turn, ids=ids, arrived_s=self._now_s)
        self._outcome.new_tokens += new
        if turn == 0 and rollout.group not in self._seen:
            self._seen.add(rollout.group)
            self._outcome.new_tokens += rollout.group_tokens
        chosen = self._placement.choose(request, self._now_s)
        worker = self._workers[chosen]
        worker.join(request)
        if not worker.is_busy:
            self._cycle(chosen)

    def _cycle(self, index: int) -> None:
        worker = self._workers[index]
        took_s, spans = worker.plan()
        worker.is_busy = took_s > 0
        if worker.is_busy:
            worker.busy_s += took_s
            stepped = list(worker.running)
            self._at(took_s, lambda: self._cycled(index, spans, stepped))

    def _cycled(self, index: int, spans: list[tuple[Request, int]], stepped: list[Request]) -> None:
        worker = self._workers[index]
        for request in stepped:
            request.sampled += 1
            if request.sampled >= request.rollout.turns[request.turn].answer_tokens:
                worker.running.remove(request)
                self._finish(worker, request)
        for request, tokens in spans:
            request.left -= tokens
            if not request.left:
                worker.pending.remove(request)
                self._prefilled(worker, request)
        self._report(index)
        self._cycle(index)

    def _prefilled(self, worker: _Worker, request: Request) -> None:
        if request.version == worker.version:
            worker.cache.insert(request.ids)
        self._outcome.prompt_tokens += request.tokens
        self._outcome.cached_tokens += request.cached
        self._placement.prefilled(request, self._now_s)
        request.sampled, request.began_s = 1, self._now_s
        if request.rollout.turns[request.turn].answer_tokens <= 1:
            self._finish(worker, request)
        else:
            worker.running.append(request)

    def _finish(self, worker: _Worker, request: Request) -> None:
        rollout, turn = request.rollout, request.turn
        answer = _own(rollout.session, turn, "answer", rollout.turns[turn].answer_tokens)
        ids = request.ids + answer
        if request.version == worker.version:
            worker.cache.insert(ids[:-TOKEN_BYTES])
        self._placement.finished(request, self._now_s, ids)
        self._outcome.turn_s.append(self._now_s - request.arrived_s)
        if turn + 1 < len(rollout.turns):
            self._at(rollout.turns[turn + 1].pause_s, lambda: self._ask(rollout, turn + 1, ids))
            return
        self._left[rollout.group] -= 1
        if not self._left[rollout.group]:
            del self._left[rollout.group]
            self._outcome.completion_s = self._now_s
            self._start_group()

    def _report(self, index: int, *, first: bool = False) -> None:
        changes = self._workers[index].changes
        if not (first or changes.stored_ or changes.removed_ or changes.anew):
            return
        stored, removed, anew = changes.stored_, changes.removed_, changes.anew or first
        changes.stored_, changes.removed_, changes.anew = [], [], False
        self._at(
            REPORT_DELAY_S,
            lambda: self._placement.reported(index, stored, removed, anew, self._now_s),
        )

    def _publish(self) -> None:
        self._version += 1
        version = self._version
        for index in range(len(self._workers)):
            self._at(index * SWAP_STAGGER_S, lambda i=index: self._swap(i, version))  # type: ignore[misc]
        self._at(self._publish_every_s, self._publish)

    def _swap(self, index: int, version: int) -> None:
        worker = self._workers[index]
        worker.version = version
        worker.cache.clear()
        self._report(index)
        self._at(0.1, lambda: self._placement.swapped(index, version, self._now_s))


def _ids(rollout: Rollout) -> bytes:
    return _own("", 0, "common", rollout.common_tokens) + _own(
        rollout.group, 0, "group", rollout.group_tokens
    )


@lru_cache(maxsize=200_000)
def _own(name: str, turn: int, part: str, tokens: int) -> bytes:
    """Return tokens that nothing else has: random ones, always the same."""
    random = Random(f"{name}/{turn}/{part}")
    # Positive int32.
    return int32_bytes([each >> 1 for each in memoryview(random.randbytes(4 * tokens)).cast("I")])
