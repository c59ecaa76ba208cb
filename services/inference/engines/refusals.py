"""Refuses requests, and rests of them, that an engine cannot serve completely, and ids in use; the
error has the engine's name or the id."""

from __future__ import annotations

from collections.abc import Container, Iterator
from contextlib import contextmanager
from dataclasses import replace

from forge.core.errors import InvalidArgument, UnsupportedByEngines
from services.inference.engines.base import Grammar, Prompt, RefusedHandOff, Reweighting, Sampling
from services.inference.engines.capabilities import Capabilities
from services.inference.engines.metrics import REFUSED_HAND_OFFS


def check_request(prompt: Prompt, able: Capabilities) -> None:
    """Raises UnsupportedByEngines, which names the engine and all that it lacks for this
    request."""
    if lacking(prompt.sampling, able):
        raise UnsupportedByEngines(refusal(prompt.sampling, able))


def refusal(sampling: Sampling, able: Capabilities) -> str:
    """Return the capabilities that the engine lacks for these parameters, with its name."""
    return f"the engine {able.engine} cannot serve {'; '.join(lacking(sampling, able))}"


def lacking(sampling: Sampling, able: Capabilities) -> list[str]:
    """Return the parameters that the engine cannot serve, in words."""
    return list(_lacking(sampling, able))


def _lacking(sampling: Sampling, able: Capabilities) -> Iterator[str]:
    if (sampling.top_k or sampling.top_p < 1 or sampling.min_p) and not able.cuts:
        yield (
            f"sampling.top_p = {sampling.top_p:g}, top_k = {sampling.top_k}, "
            f"min_p = {sampling.min_p:g}: it has no cuts"
        )
    if sampling.min_tokens and not able.min_tokens:
        yield f"sampling.min_tokens = {sampling.min_tokens}"
    if sampling.top_logprobs > able.top_logprobs:
        yield f"sampling.top_logprobs = {sampling.top_logprobs}: it has {able.top_logprobs}"
    if sampling.grammar is not None:
        yield from _lacking_grammar(sampling.grammar, able)
    if sampling.reweighting is not None:
        yield from _lacking_penalties(sampling.reweighting, able)


def _lacking_grammar(grammar: Grammar, able: Capabilities) -> Iterator[str]:
    if grammar.kind not in able.grammars:
        kinds = ", ".join(sorted(able.grammars)) or "none"
        yield f"sampling.grammar.{grammar.kind}: its kinds are {kinds}"
    elif grammar.matched_tokens and "grammar" not in able.resumes:
        yield (
            f"sampling.grammar.matched_tokens = {grammar.matched_tokens}: "
            "it begins an answer under a grammar only at its first token"
        )


def _lacking_penalties(change: Reweighting, able: Capabilities) -> Iterator[str]:
    if not able.penalties:
        yield "sampling's penalties and logit_bias"
        return
    counts = change.presence or change.frequency
    if counts and change.answered_tokens and "penalties" not in able.resumes:
        yield (
            f"sampling.answered_tokens = {change.answered_tokens} with presence_penalty or "
            "frequency_penalty: it counts the tokens of an answer from its first one"
        )


def rest_of(sampling: Sampling, sampled: int) -> Sampling:
    """Return the parameters that continue an answer behind `sampled` tokens."""
    grammar, change = sampling.grammar, sampling.reweighting
    if grammar is not None:
        grammar = replace(grammar, matched_tokens=grammar.matched_tokens + sampled)
    if change is not None:
        change = replace(change, answered_tokens=change.answered_tokens + sampled)
    return replace(
        sampling,
        max_tokens=sampling.max_tokens - sampled,
        min_tokens=max(0, sampling.min_tokens - sampled),
        grammar=grammar,
        reweighting=change,
    )


def refused(reason: str, words: str) -> RefusedHandOff:
    """Return the error of a hand-off that is not used; count it by `reason`."""
    REFUSED_HAND_OFFS.labels(reason).inc()
    return RefusedHandOff(words)


class UsedIds:
    """The ids of requests under way: engines tell requests apart by them alone."""

    def __init__(self) -> None:
        self._ids: set[str] = set()

    @contextmanager
    def using(self, request_id: str, held: Container[str] = ()) -> Iterator[None]:
        """Around a request. Raises InvalidArgument for an id in use, and for one that is `held`: a
        second prompt would take its place, and its memory would have no end."""
        if request_id in held:
            raise InvalidArgument(f"request_id = {request_id!r} is that of a held prompt")
        if request_id in self._ids:
            raise InvalidArgument(f"request_id = {request_id!r} is in use by another request")
        self._ids.add(request_id)
        try:
            yield
        finally:
            self._ids.discard(request_id)
