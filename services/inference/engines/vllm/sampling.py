"""Converts between the contract's requests and vLLM's. No I/O."""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import blake2b
from math import isclose, isfinite, isinf
from typing import Any

from msgspec import structs
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from forge.core.errors import InvalidArgument, Unavailable, UnsupportedByEngines
from forge.grammar.answer_grammar import guided, source
from services.inference.engines.base import (
    BrokenWeights,
    Finish,
    Grammar,
    Likeliest,
    ModelLimits,
    Prompt,
    Sampling,
    Tokens,
)
from services.inference.engines.vllm.exchange.orders import OWN, Orders

_SEED_BYTES = 7
"""vLLM's seeds are signed 64-bit numbers."""
_LEAST_TEMPERATURE, _MOST_TEMPERATURE = 0.01, 2.0
"""vLLM raises a lower temperature to the least one without an error, and refuses a higher one."""
_KINDS = {"json_schema": "json", "regex": "regex", "lark": "grammar"}
_FINISH = {"stop": Finish.STOP, "length": Finish.LENGTH}


def to_params(
    prompt: Prompt,
    limits: ModelLimits,
    *,
    end_token: int | None,
    first: tuple[int, ...],
    shares: bool,
) -> SamplingParams:
    """Return vLLM's parameters. `end_token`: the tokenizer's, with which alone a grammar ends.
    `first`: tokens that the answer begins with. `shares`: whether the engine has the additions to
    vLLM's sampler, see `answer_logits`.

    Raises UnsupportedByEngines for a grammar that cannot end with one of the stop tokens, and
    without these additions for a temperature that vLLM does not have.
    """
    asked = prompt.sampling
    most_tokens = min(asked.max_tokens, limits.context_tokens - prompt.tokens)
    orders = _orders(asked, first, shares=shares)
    resumed = orders.grammar is not None
    # Those of an answer that began elsewhere are among the orders.
    change = asked.reweighting if not orders.answered else None
    bias = asked.reweighting.bias if asked.reweighting else ()
    return SamplingParams(
        temperature=_bounded(asked.temperature),
        top_p=asked.top_p,
        top_k=min(asked.top_k, limits.vocabulary) or -1,
        min_p=asked.min_p,
        max_tokens=most_tokens,
        # The end of the context ends an answer before its least length.
        min_tokens=min(asked.min_tokens, most_tokens),
        stop_token_ids=sorted(asked.stop_ids),
        ignore_eos=True,
        seed=stream_seed(asked.seed, prompt.tokens),
        logprobs=asked.top_logprobs + orders.own,
        presence_penalty=change.presence if change else 0.0,
        frequency_penalty=change.frequency if change else 0.0,
        repetition_penalty=change.repetition if change else 1.0,
        logit_bias=dict(bias) or None,
        structured_outputs=None if resumed else _structured(asked.grammar, asked, end_token),
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        extra_args=None if orders == Orders() else orders.extra_args(),
    )


def _orders(asked: Sampling, first: tuple[int, ...], *, shares: bool) -> Orders:
    """Orders that vLLM's own parameters cannot express."""
    grammar, change = asked.grammar, asked.reweighting
    orders = Orders(
        first=first,
        scale=_scale(asked.temperature, has_scales=shares),
        own=shares and asked.reshapes,
    )
    if grammar is not None and grammar.matched_tokens:
        orders = structs.replace(
            orders,
            matched=grammar.matched_tokens,
            grammar=(grammar.kind, grammar.text, grammar.lenient),
            stop_ids=tuple(sorted(asked.stop_ids)),
        )
    if change is not None and change.answered_tokens:
        orders = structs.replace(
            orders,
            answered=change.answered_tokens,
            presence=change.presence,
            frequency=change.frequency,
            repetition=change.repetition,
        )
    return orders


def _bounded(temperature: float) -> float:
    """Return the temperature for vLLM; 0 is greedy."""
    return temperature and min(max(temperature, _LEAST_TEMPERATURE), _MOST_TEMPERATURE)


def _scale(temperature: float, *, has_scales: bool) -> float:
    """Return the factor of the logits that gives this temperature at vLLM's bounded one. Raises
    UnsupportedByEngines for another factor than 1 if the sampler has none."""
    scale = _bounded(temperature) / (temperature or 1.0) or 1.0
    # The wire's 0.01 is a little less.
    if isclose(scale, 1.0, rel_tol=1e-6):
        return 1.0
    if not has_scales:
        raise UnsupportedByEngines(
            f"sampling.temperature = {temperature:g}: the engine vllm with drafts has 0 and "
            f"{_LEAST_TEMPERATURE:g} to {_MOST_TEMPERATURE:g}"
        )
    return scale


def stream_seed(seed: int, prompt_tokens: int) -> int:
    """Return a seed for the stream of draws behind a prompt. A request that moves has a longer
    prompt: with its own seed it would use the same draws again, at other positions."""
    data = seed.to_bytes(8, "little", signed=seed < 0) + prompt_tokens.to_bytes(8, "little")
    return int.from_bytes(blake2b(data, digest_size=_SEED_BYTES).digest(), "little")


def _structured(
    grammar: Grammar | None, asked: Sampling, end_token: int | None
) -> StructuredOutputsParams | None:
    if grammar is None:
        return None
    if end_token is None:
        raise UnsupportedByEngines(
            "sampling.grammar: the engine vllm reads grammars with the model's tokenizer, and "
            "there is no tokenizer.json in model_path"
        )
    if end_token not in asked.stop_ids:
        raise UnsupportedByEngines(
            f"sampling.grammar: the engine vllm ends an answer under a grammar with token "
            f"{end_token} alone, which is not in stop_token_ids"
        )
    if asked.min_tokens:
        raise UnsupportedByEngines(
            f"sampling.min_tokens = {asked.min_tokens} beside sampling.grammar: the engine vllm "
            "has no token left where a complete answer is shorter"
        )
    # Its checks, and the same white space and leniency as with the embedded engine.
    source(grammar.kind, grammar.text, lenient=grammar.lenient)
    text = grammar.text
    if grammar.kind == "json_schema":
        text = json.dumps(guided(json.loads(text), lenient=grammar.lenient))
    return StructuredOutputsParams(**{_KINDS[grammar.kind]: text})


def to_tokens(completion: Any, asked: Sampling, versions: Sequence[int]) -> Tokens:
    """Return the new tokens of an output. Raises BrokenWeights for a log-prob that is no number."""
    ids = tuple(completion.token_ids)
    columns = completion.logprobs or ()
    # By token id: the order of an entry is no part of vLLM's interface.
    logprobs = tuple(entry[token].logprob for token, entry in zip(ids, columns, strict=True))
    own = tuple(entry.pop(OWN).logprob for entry in columns if OWN in entry)
    if any(map(isinf, own)):
        raise InvalidArgument("sampling.grammar cannot be followed by any token of the vocabulary")
    if not all(map(isfinite, logprobs + own)):
        raise BrokenWeights("the engine vllm sampled a token with a log-prob that is not finite")
    greedy = asked.temperature == 0
    allowed = tuple(0.0 if greedy else a - b for a, b in zip(own, logprobs, strict=False))
    top: tuple[Likeliest, ...] = ()
    if asked.top_logprobs:
        top = tuple(_likeliest(entry, asked.top_logprobs) for entry in columns)
    if greedy:
        logprobs = (0.0,) * len(ids)
    return Tokens(ids=ids, logprobs=logprobs, versions=tuple(versions), allowed=allowed, top=top)


def _likeliest(entry: dict[int, Any], count: int) -> Likeliest:
    """The sampled token is in the entry, too, if it is none of the likeliest."""
    ranked = sorted(entry.items(), key=lambda one: (-one[1].logprob, one[1].rank or 0))
    return tuple((token, _floor(value.logprob)) for token, value in ranked[:count])


def _floor(logprob: float) -> float:
    """vLLM has the least float for a token without probability in some paths."""
    return float("-inf") if isinf(logprob) or logprob < -1e30 else logprob


def to_finish(reason: str | None) -> Finish | None:
    """Return the finish of an output. Raises Unavailable for a request that vLLM has ended by
    itself: another worker continues it."""
    if reason is None:
        return None
    if reason not in _FINISH:
        raise Unavailable(f"the engine vllm ended the request: {reason}")
    return _FINISH[reason]


def versions_of(starts: Sequence[tuple[str, int]], first: int, count: int) -> list[int]:
    """Return the version of each token from `first` on. `starts`: versions, and the number of the
    first token that each sampled."""
    return [
        next(int(version) for version, start in reversed(starts) if start <= number)
        for number in range(first, first + count)
    ]
