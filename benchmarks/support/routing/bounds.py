"""Bounds for the routing simulation: one that no placement beats, and one that foresight reaches.

`least_work_s` is a bound: every token once, every step full. `Clairvoyant` knows each session's
further turns, which no router does. It is no bound, but shows what foresight is worth.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.support.routing.rivals import Rule
from benchmarks.support.routing.traffic import EngineCosts, Traffic, Turn
from benchmarks.support.routing.worker import BLOCK_TOKENS, PASS_TOKENS, Request

WEIGHTS: tuple[tuple[float, float | None], ...] = ((4, None), (8, None), (8, 4), (8, 8))
"""Settings of `Clairvoyant` that are tried; the best one counts."""
_BATCH = 9.0
"""Requests that share a step; the router's runs have 5 to 9."""


def prefill_s(costs: EngineCosts, tokens: int, cached: int) -> float:
    """Return the least time to compute `tokens` behind `cached` ones."""
    context = cached + tokens / 2
    each_s = costs.token_s + costs.context_s * context + costs.pass_s / PASS_TOKENS
    return tokens * each_s


def answer_s(costs: EngineCosts, prompt: int, answer: int, *, batch: float) -> float:
    """Return the time of an answer's steps, shared by `batch` requests."""
    steps = answer - 1
    read = steps * prompt + steps * answer / 2
    return steps * (costs.row_s + costs.step_s / batch) + read * costs.kv_s


def least_work_s(traffic: Traffic) -> float:
    """Return the least completion time: the cluster computes each token once, in full passes,
    no session pauses, and a step of a worker serves its share of all sessions."""
    costs, workers = traffic.costs, len(traffic.speeds)
    batch = traffic.concurrency * max(map(len, traffic.groups)) / workers
    work_s, common_seen = 0.0, False
    for group in traffic.groups:
        for place, rollout in enumerate(group):
            history = shared = rollout.common_tokens + rollout.group_tokens
            known = shared if place else rollout.common_tokens if common_seen else 0
            common_seen = True
            for number, turn in enumerate(rollout.turns):
                known = known if number == 0 else history - 1
                prompt = history + turn.new_tokens
                cached = min(known, prompt - 1) // BLOCK_TOKENS * BLOCK_TOKENS
                work_s += prefill_s(costs, prompt - cached, cached)
                work_s += answer_s(costs, prompt, turn.answer_tokens, batch=batch)
                history = prompt + turn.answer_tokens
    return work_s / workers


class Clairvoyant(Rule):
    """Places a session where the known rest of all sessions, with its own and what it computes
    anew, is least."""

    def __init__(
        self, workers: int, costs: EngineCosts, *, weight: float, move_weight: float | None
    ) -> None:
        """`weight`: of what is computed anew at a first turn; `move_weight`: at a later one, times
        `weight`; None: sessions stay."""
        super().__init__(workers)
        self._costs = costs
        self._weight = weight
        self._move_weight = move_weight
        self._rest_s = [0.0] * workers
        self._homes: dict[str, tuple[int, float]] = {}
        """Worker and rest of each session."""
        self._groups: list[set[str]] = [set() for _ in range(workers)]

    def rule(self, request: Request) -> int:
        """Return the worker with the least work."""
        rollout, turn = request.rollout, request.rollout.turns[request.turn]
        history = request.tokens - turn.new_tokens
        rest_s = self._rest(rollout.turns[request.turn :], history)
        home = self._homes.get(request.session)
        if home is not None:
            self._rest_s[home[0]] -= home[1]

        def work_s(worker: int) -> float:
            if home is not None and worker == home[0]:
                return self._rest_s[worker]
            shared = rollout.common_tokens + rollout.group_tokens
            known = shared if rollout.group in self._groups[worker] else 0
            anew_s = prefill_s(self._costs, history - known, known)
            weight = self._weight * (1 if home is None else self._move_weight or 0.0)
            return self._rest_s[worker] + weight * anew_s

        movable = home is None or self._move_weight is not None
        chosen = min(self.workers, key=work_s) if movable or home is None else home[0]
        self._groups[chosen].add(rollout.group)
        self._homes[request.session] = (chosen, rest_s)
        self._rest_s[chosen] += rest_s
        return chosen

    def finished(self, request: Request, now_s: float, ids: bytes) -> None:
        """Subtract what is done."""
        super().finished(request, now_s, ids)
        worker, before_s = self._homes[request.session]
        turns = request.rollout.turns
        history = request.tokens + turns[request.turn].answer_tokens
        rest_s = self._rest(turns[request.turn + 1 :], history)
        self._rest_s[worker] += rest_s - before_s
        self._homes[request.session] = (worker, rest_s)

    def _rest(self, turns: Sequence[Turn], history: int) -> float:
        found_s = 0.0
        for turn in turns:
            prompt = history + turn.new_tokens
            found_s += prefill_s(self._costs, turn.new_tokens, history)
            found_s += answer_s(self._costs, prompt, turn.answer_tokens, batch=_BATCH)
            history = prompt + turn.answer_tokens
        return found_s
