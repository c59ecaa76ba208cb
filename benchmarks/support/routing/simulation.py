"""Workers of the role both in virtual time, under the traffic of groups of multi-turn rollouts.

Owns the order of events. The placement under test comes from outside. Not here: the engine
(`worker`), the traffic (`traffic`), the network, which costs all placements the
same.
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

from benchmarks.support.routing.traffic import Rollout, Traffic
from benchmarks.support.routing.worker import Request, Worker, common_blocks
from forge.core.token_columns import TOKEN_BYTES, int32_bytes

CACHE_TOKENS = 200_000
REPORT_DELAY_S = 0.02
"""From a change of a cache until the router knows."""
SWAP_STAGGER_S = 0.05
"""Between the swaps of two workers after a publication."""


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

    def lost(self, worker: int, requests: Sequence[Request], now_s: float) -> None:
        """Observe that a worker is lost, with its requests; they are placed again."""


@dataclass(slots=True, kw_only=True)
class Outcome:
    """Result of one run."""

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
    """Runs a traffic over its workers, groups in order."""

    def __init__(
        self,
        traffic: Traffic,
        placement: Placement,
        *,
        publishes: bool = False,
        one_cache: bool = False,
    ) -> None:
        """`one_cache`: all workers have the cached and the computed tokens of each other, at no
        cost."""
        self._traffic = traffic
        self._waiting = deque(traffic.groups)
        self._placement = placement
        self._workers = [Worker(traffic.costs, CACHE_TOKENS, speed) for speed in traffic.speeds]
        self._one_cache = one_cache
        if one_cache:
            for worker in self._workers:
                worker.cache = self._workers[0].cache
        self._publish_every_s = traffic.publish_every_s if publishes else 0.0
        self._random = Random(0)
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
        for _ in range(self._traffic.concurrency):
            self._start_group()
        if self._publish_every_s:
            self._at(self._publish_every_s, self._publish)
        if self._traffic.lost_after_s:
            self._at(self._traffic.lost_after_s, self._lose)
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
        self._place(request)

    def _place(self, request: Request) -> None:
        chosen = self._placement.choose(request, self._now_s)
        worker = self._workers[chosen]
        worker.join(request)
        if self._one_cache:
            self._find_anywhere(request)
        if not worker.is_busy:
            self._cycle(chosen)

    def _find_anywhere(self, request: Request) -> None:
        """Count as cached what any worker computes."""
        limit = request.tokens - 1
        others = [one for worker in self._workers for one in worker.pending if one is not request]
        shared = max((common_blocks(one.ids, request.ids, limit) for one in others), default=0)
        request.cached, request.source = max(request.cached, shared), None
        request.left = request.tokens - request.cached

    def _lose(self) -> None:
        """The last worker leaves; its requests continue behind their tokens elsewhere."""
        index = len(self._workers) - 1
        worker = self._workers[index]
        requests = [*worker.pending, *worker.running]
        worker.is_lost = True
        self._placement.lost(index, requests, self._now_s)
        for one in requests:
            ids = one.ids + self._answer(one)[: one.sampled * TOKEN_BYTES]
            self._place(
                Request(
                    rollout=one.rollout,
                    turn=one.turn,
                    ids=ids,
                    arrived_s=one.arrived_s,
                    answered=one.answered + one.sampled,
                )
            )

    @staticmethod
    def _answer(request: Request) -> bytes:
        """Return the tokens that are missing from the answer."""
        rollout, turn = request.rollout, request.turn
        whole = _own(rollout.session, turn, "answer", rollout.turns[turn].answer_tokens)
        return whole[request.answered * TOKEN_BYTES :]

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
        if worker.is_lost:
            return
        for request in stepped:
            request.sampled += 1
            if request.sampled >= request.to_sample:
                worker.running.remove(request)
                self._finish(worker, request)
        for request, tokens in spans:
            request.left -= tokens
            if not request.left:
                worker.pending.remove(request)
                self._prefilled(worker, request)
        self._report(index)
        self._cycle(index)

    def _prefilled(self, worker: Worker, request: Request) -> None:
        if request.version == worker.version:
            worker.cache.insert(request.ids)
        self._outcome.prompt_tokens += request.tokens
        self._outcome.cached_tokens += request.cached
        self._placement.prefilled(request, self._now_s)
        request.sampled, request.began_s = 1, self._now_s
        if request.to_sample <= 1:
            self._finish(worker, request)
        else:
            worker.running.append(request)

    def _finish(self, worker: Worker, request: Request) -> None:
        rollout, turn = request.rollout, request.turn
        ids = request.ids + self._answer(request)
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
            # One cache is emptied once.
            delay_s = 0.0 if self._one_cache else index * SWAP_STAGGER_S
            self._at(delay_s, lambda i=index: self._swap(i, version))  # type: ignore[misc]
        self._at(self._publish_every_s, self._publish)

    def _swap(self, index: int, version: int) -> None:
        worker = self._workers[index]
        if worker.is_lost:
            return
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
