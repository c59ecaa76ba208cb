"""Times of work, learned by engine: the rates of one engine say nothing about another. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import fmean

from forge.core.placement.routing import LearnedRate
from forge.core.placement.step_time import StepTime
from services.inference.router.fleet.stored_prefixes import Store

_TRANSFER_S_PER_TOKEN = 20e-6
"""Guess of the transfer of one token's keys and values, until transfers have shown it."""
_PREFILL_S_PER_TOKEN = 1e-4
_STEP_S = 1e-3


@dataclass(slots=True, eq=False)
class Times:
    """Times of work at one worker, or at all workers of an engine."""

    prefill: LearnedRate = field(
        default_factory=lambda: LearnedRate(_PREFILL_S_PER_TOKEN, memory_units=20_000.0)
    )
    """Seconds per computed token."""
    step: StepTime = field(default_factory=lambda: StepTime(each_s=_STEP_S))


@dataclass(slots=True, eq=False)
class EngineCosts:
    """Costs of all workers of one engine."""

    times: Times = field(default_factory=Times)
    transfer: LearnedRate = field(
        default_factory=lambda: LearnedRate(_TRANSFER_S_PER_TOKEN, memory_units=20_000.0)
    )
    """Seconds per token of keys and values that decode fetched."""
    store: Store = field(default_factory=Store)
    """The KV store that they share."""


class Costs:
    """Rates by engine, and for an unmeasured worker or engine the nearest that is known.

    A worker without measurements counts as the others of its engine, an engine without any as the
    mean of the others: a guess would draw or repel all requests. A first measurement ends that.
    """

    def __init__(self) -> None:
        self._by_engine: dict[str, EngineCosts] = {}
        self.answer_tokens = LearnedRate(64.0, memory_units=200.0)
        """Tokens per answer, over the requests of all engines."""

    def of(self, engine: str) -> EngineCosts:
        """Return the rates of an engine."""
        found = self._by_engine.get(engine)
        if found is None:
            found = self._by_engine[engine] = EngineCosts()
        return found

    def prefill_s(self, engine: str, own: Times) -> float:
        """Return the seconds per computed token of a worker with the times `own`."""
        if own.prefill.is_known:
            return own.prefill.seconds
        return self._rate(engine, lambda costs: costs.times.prefill)

    def transfer_s(self, engine: str) -> float:
        """Return the seconds per token that a worker of an engine fetches."""
        return self._rate(engine, lambda costs: costs.transfer)

    def each_s(self, engine: str, own: Times) -> float:
        """Return the seconds that one more request adds to a step of a worker."""
        if own.step.is_known:
            return own.step.each_s
        of_engine = self.of(engine).times.step
        known = [
            one.times.step.each_s for one in self._by_engine.values() if one.times.step.is_known
        ]
        return of_engine.each_s if of_engine.is_known or not known else fmean(known)

    def observe_prefill(self, engine: str, own: Times, *, seconds: float, tokens: int) -> None:
        """Learn from the computation of `tokens` of a prompt."""
        for times in (own, self.of(engine).times):
            times.prefill.observe(seconds=seconds, units=tokens)

    def observe_decode(
        self, engine: str, own: Times, *, seconds: float, tokens: int, running: float
    ) -> None:
        """Learn from an answer of `tokens`, sampled beside `running` requests with itself."""
        if tokens:
            for times in (own, self.of(engine).times):
                times.step.observe(running=running, seconds=seconds / tokens)
            self.answer_tokens.observe(seconds=tokens, units=1)

    def _rate(self, engine: str, of: Callable[[EngineCosts], LearnedRate]) -> float:
        own = of(self.of(engine))
        known = [of(one).seconds for one in self._by_engine.values() if of(one).is_known]
        return own.seconds if own.is_known or not known else fmean(known)
