"""Capabilities that a request needs of its worker's engine, to begin and to continue. Pure.

A request begins on any engine that can do all that it asks. It continues on an engine that can also
resume its answer: a grammar and penalties have a state over the tokens so far. Where no engine can
resume it, it begins again if its caller has no token of it yet.

An engine that can resume an answer may still change it: other draws than those of the caller's
seed, no shares, another model. Engines that change nothing are preferred; else the answer starts
over there with its tokens as the prompt. Draws of two engines never agree, even if both draw by
seed and position: each has noise of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from forge.core.errors import Unavailable, UnsupportedByEngines
from services.inference.engines.base import Sampling
from services.inference.engines.refusals import lacking, refusal, rest_of
from services.inference.router.fleet.workers import Engine, Worker

T = TypeVar("T", bound=Worker)


class CannotContinue(Unavailable):
    """No present engine can resume this answer, and some can sample it again from the start."""

    def __init__(self, message: str, *, may_return: bool) -> None:
        """`may_return`: a worker that could has left a short time ago."""
        super().__init__(message, retry_after_s=None)
        self.may_return = may_return


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Needs of one request, with its tokens so far."""

    sampling: Sampling | None = None
    """Sampling parameters of the request, without the tokens so far; None: needs nothing."""
    seeded: bool = False
    """The caller has set the seed of random draws."""
    sampled_tokens: int = 0
    begun_on: Engine | None = None
    """The engine that sampled the last token; None before the first."""
    refused_by: Mapping[Engine, str] = field(default_factory=dict)
    """Engines that have refused the request for a reason beyond their capabilities, and their
    words."""

    def lacks(self, engine: Engine) -> bool:
        """Whether an engine cannot serve the rest of the answer."""
        if engine in self.refused_by:
            return True
        rest = self._rest
        return engine.able is not None and rest is not None and bool(lacking(rest, engine.able))

    def begins_on(self, engine: Engine) -> bool:
        """Whether an engine can serve the whole answer from its first token."""
        return not replace(self, sampled_tokens=0, begun_on=None).lacks(engine)

    def change_by(self, engine: Engine) -> str:
        """Return what changes in the answer when an engine continues it: model, draws or shares;
        empty if nothing does."""
        before, asked = self.begun_on, self.sampling
        if before is None or asked is None:
            return ""
        if not engine.has_model_of(before):
            return "model"
        if before.able is None or engine.able is None:
            return ""
        same_draws = before.name == engine.name and engine.able.draws == "positional"
        if self.seeded and not same_draws:
            return "draws"
        if asked.reshapes and before.able.shares and not engine.able.shares:
            return "shares"
        return ""

    def refusals(self, engines: Iterable[Engine]) -> str:
        """Return the missing capabilities of each engine, in words."""
        rest = self._rest
        words = {self.refused_by[one] for one in engines if one in self.refused_by}
        for able in {one.able for one in engines}:
            if able is not None and rest is not None and lacking(rest, able):
                words.add(refusal(rest, able))
        return "; ".join(sorted(words))

    @property
    def unresumed(self) -> str:
        """State that an engine would have to resume: grammar or penalties."""
        return "grammar" if self.sampling and self.sampling.grammar else "penalties"

    @property
    def _rest(self) -> Sampling | None:
        """The parameters for the rest of the answer, as `codec.sampling_of_rest` sends them."""
        asked, sampled = self.sampling, self.sampled_tokens
        return asked if asked is None or not sampled else rest_of(asked, sampled)


NO_NEEDS = Needs()


def require_able(
    needs: Needs, engines: Collection[Engine], *, departed: Collection[Engine]
) -> None:
    """Check that the engines of a fleet can read and sample the rest of an answer; roles without
    any engine are not checked.

    Raises UnsupportedByEngines, which names what each engine lacks. If one of `departed`, which
    left a short time ago, could serve it, Unavailable; CannotContinue if others could begin it.
    """
    for present, gone in (
        ([one for one in engines if one.reads], [one for one in departed if one.reads]),
        ([one for one in engines if one.samples], [one for one in departed if one.samples]),
    ):
        if not present or not all(map(needs.lacks, present)):
            continue
        may_return = not all(map(needs.lacks, gone))
        words = f"no worker can serve this request: {needs.refusals(present)}"
        if needs.sampled_tokens and any(map(needs.begins_on, present)):
            raise CannotContinue(words, may_return=may_return)
        if may_return:
            raise Unavailable(words)
        raise UnsupportedByEngines(words)


def able_of(needs: Needs, workers: Sequence[T]) -> list[T]:
    """Return the workers whose engine can serve the rest of the answer."""
    lacks = {engine: needs.lacks(engine) for engine in engines_of(workers)}
    return [worker for worker in workers if not lacks[worker.engine]]


def unchanging(needs: Needs, workers: Sequence[T]) -> Sequence[T]:
    """Return the workers that change nothing in the answer; all, if none is."""
    changes = {engine: needs.change_by(engine) for engine in engines_of(workers)}
    return [worker for worker in workers if not changes[worker.engine]] or workers


def engines_of(workers: Iterable[Worker]) -> set[Engine]:
    """Return the engines of workers, each once."""
    return {worker.engine for worker in workers}
