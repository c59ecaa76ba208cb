"""Routing: the cost of a prompt on each worker, in seconds, and the cheapest worker.

    cost(worker) = queue_delay + (1 + slowed) * (sampling_time + prefill_time(tokens cached nowhere)
                 + min(migration_time, prefill_time)(tokens cached only elsewhere))

`slowed` is the number of requests that wait while this one is computed: where prefill and decode
share a processor, a prompt that is read twice costs all of them. Without it each request would take
the shortest queue at the others' expense, and histories would move at every fluctuation. Learns
rates from the workers' reports. Owns no state of the cluster: the router passes the cached tokens
and the queue of each worker.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One worker's state for one prompt."""

    worker: str
    queue_delay_s: float
    """Time until it would begin."""
    cached_tokens: int
    """Tokens of this prompt in the worker's cache."""
    prefill_s_per_token: float
    engine: str = ""
    """Workers of one engine alone share a store."""
    stored_tokens: int = 0
    """Tokens of this prompt in the store that it shares with others."""
    migration_s_per_token: float = math.inf
    """Transfer of one token's keys and values from elsewhere; infinite if impossible."""
    sampling_s: float = 0.0
    """Time that its answer adds to the worker's steps."""
    slowed: float = 0.0
    """Requests of the worker that its computation slows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadGuard:
    """Limit on a worker's load, relative to the idlest worker.

    Without it, all requests with a popular prefix go to the one worker that has cached it.
    """

    ratio: float = 2.0
    slack_s: float = 0.5

    def admits(self, queue_delay_s: float, *, idlest_s: float) -> bool:
        """Whether a worker with this queue delay may be chosen."""
        return queue_delay_s <= self.ratio * idlest_s + self.slack_s


def cost_s(candidate: Candidate, *, prompt_tokens: int, cached_anywhere_tokens: int) -> float:
    """Return the seconds that a prompt costs itself and others on `candidate`."""
    here = min(candidate.cached_tokens, prompt_tokens)
    elsewhere = max(0, min(cached_anywhere_tokens, prompt_tokens) - here)
    nowhere = prompt_tokens - here - elsewhere
    cheapest_per_token = min(candidate.migration_s_per_token, candidate.prefill_s_per_token)
    # inf * 0 is not 0.
    moved_s = elsewhere * cheapest_per_token if elsewhere else 0.0
    computed_s = nowhere * candidate.prefill_s_per_token if nowhere else 0.0
    own_s = candidate.sampling_s + computed_s + moved_s
    return candidate.queue_delay_s + (1 + candidate.slowed) * own_s


def choose(
    candidates: Iterable[Candidate],
    *,
    prompt_tokens: int,
    guard: LoadGuard | None = None,
) -> Candidate | None:
    """Return the cheapest worker within the load guard; of equals the idlest, then the first name.
    None without a candidate."""
    workers = list(candidates)
    if not workers:
        return None
    anywhere: dict[str, int] = {}
    for one in workers:
        known = max(one.cached_tokens, one.stored_tokens)
        anywhere[one.engine] = max(anywhere.get(one.engine, 0), known)
    if guard is not None:
        idlest_s = min(worker.queue_delay_s for worker in workers)
        workers = [w for w in workers if guard.admits(w.queue_delay_s, idlest_s=idlest_s)]
    return min(
        workers,
        key=lambda worker: (
            cost_s(
                worker,
                prompt_tokens=prompt_tokens,
                cached_anywhere_tokens=anywhere[worker.engine],
            ),
            worker.queue_delay_s,
            worker.worker,
        ),
    )


class LearnedRate:
    """Seconds per unit of work, as an exponential average weighted by the work observed."""

    def __init__(self, initial_s: float, *, memory_units: float) -> None:
        self._work = memory_units / 16  # the first measurements outweigh the initial guess
        self._seconds = initial_s * self._work
        self._memory_units = memory_units
        self.is_known = False
        """Whether it is more than the initial guess."""

    @property
    def seconds(self) -> float:
        """Seconds per unit of work."""
        return self._seconds / self._work

    def observe(self, *, seconds: float, units: float) -> None:
        """Observe `units` of work in `seconds`; ignores zero work."""
        if units <= 0 or seconds < 0:
            return
        keep = math.exp(-units / self._memory_units)
        self.is_known = True
        self._seconds = self._seconds * keep + seconds
        self._work = self._work * keep + units
