"""Requests and answers of the library: parameters in, tokens with log-probs out.

Every call makes new objects: the library changes max_tokens on the parameters of a prefill.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from forge.core.errors import ForgeError, UnsupportedByEngines
from services.inference.engines.base import Finish, Likeliest, Sampling, Tokens
from services.inference.engines.capabilities import Capabilities
from services.inference.engines.tensorrt_llm.library.library import Library
from services.inference.engines.tensorrt_llm.library.surface import TARGET, Feature

MOST_TOP_LOGPROBS = 20
"""Most likeliest tokens that the library returns."""
CAPABILITIES = Capabilities(
    engine="tensorrt_llm",
    roles=frozenset({"prefill", "decode", "both"}),
    hand_offs=frozenset({"tensorrt_llm"}),
    update="in_flight",
    draws="stream",
    cuts=True,
    top_logprobs=MOST_TOP_LOGPROBS,
    cache_events=True,
)
"""Capabilities of a version with all features, with a transceiver; see `capabilities_of`."""
NO_END = -1
"""The library's own id for: no token ends the answer."""
_SEED_BITS = 63
_CANCELLED = "cancelled"


def capabilities_of(features: Collection[Feature], *, transfers: bool) -> Capabilities:
    """Return the abilities of a version with these features. `transfers`: whether the engine has a
    transceiver."""
    return replace(
        CAPABILITIES,
        roles=CAPABILITIES.roles if Feature.DISAGGREGATION in features else frozenset({"both"}),
        hand_offs=CAPABILITIES.hand_offs if transfers else frozenset(),
        update="in_flight" if Feature.PAUSE in features else "drain",
        # Elsewhere log-probs are of the model's own distribution.
        cuts=Feature.PROCESSED_LOGPROBS in features,
    )


class WrongAnswer(ForgeError):
    """The library returned what its surface rules out; the message names it."""


@dataclass(slots=True, kw_only=True)
class Sampled:
    """Columns over tokens that the library has sampled."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    top: list[Likeliest] = field(default_factory=list)

    def extend(self, other: Sampled | Tokens) -> None:
        """Append the tokens of `other`."""
        self.ids += other.ids
        self.logprobs += other.logprobs
        self.versions += other.versions
        self.top += other.top

    def tokens(self, start: int = 0) -> Tokens:
        """Return the tokens from number `start` on."""
        return Tokens(
            ids=tuple(self.ids[start:]),
            logprobs=tuple(self.logprobs[start:]),
            versions=tuple(self.versions[start:]),
            top=tuple(self.top[start:]),
        )


def check_temperature(library: Library, sampling: Sampling) -> None:
    """Raises `UnsupportedByEngines` for a temperature whose log-probs this version does not
    return."""
    tempered = sampling.temperature not in (0.0, 1.0)
    if tempered and Feature.PROCESSED_LOGPROBS not in library.features:
        raise UnsupportedByEngines(
            f"the engine tensorrt_llm cannot serve sampling.temperature = "
            f"{sampling.temperature:g}: this version returns log-probs of the model's own "
            f"distribution alone, at temperature 1; install tensorrt_llm {TARGET}"
        )


def sampling_params(library: Library, sampling: Sampling, *, max_tokens: int, leg: int) -> Any:
    """Return new SamplingParams for one call. Raises `UnsupportedByEngines` for values that the
    library refuses.

    `leg`: number of this call for its request. Each draws from random numbers of its own, since a
    continuation must not repeat the draws of the beginning.
    """
    arguments: dict[str, Any] = {
        "max_tokens": max_tokens,
        "end_id": NO_END,
        "stop_token_ids": sorted(sampling.stop_ids) or None,
        # The stop token is part of the answer.
        "include_stop_str_in_output": True,
        "seed": _seed(sampling.seed, leg),
        "logprobs": _logprobs(library, sampling),
        "detokenize": False,
    }
    greedy = sampling.temperature == 0
    if not greedy:
        arguments["temperature"] = sampling.temperature
        arguments["top_p"] = sampling.top_p
        arguments["top_k"] = sampling.top_k
        if sampling.min_p:
            arguments["min_p"] = sampling.min_p
    if library.processed is not None:
        # The likeliest tokens of a greedy answer are of the distribution at temperature 1.
        arguments["logprobs_mode"] = library.raw if greedy else library.processed
    try:
        return library.sampling_params(**arguments)
    except ValueError as error:
        raise UnsupportedByEngines(f"engine 'tensorrt_llm' refuses the request: {error}") from error


def read_tokens(output: Any, *, start: int, sampling: Sampling, version: int) -> Sampled:
    """Return the tokens of a CompletionOutput from `start` on, which weights `version` sampled. A
    greedy token is certain: its log-prob is 0. Raises `WrongAnswer` for a token without a finite
    log-prob of its own."""
    found = Sampled()
    entries: Sequence[Mapping[int, Any]] = output.logprobs or ()
    for place in range(start, len(output.token_ids)):
        token = output.token_ids[place]
        entry = entries[place] if place < len(entries) else {}
        if token not in entry:
            raise WrongAnswer(f"tensorrt_llm returned no log-prob of token {token} at {place}")
        logprob = float(entry[token].logprob)
        if not math.isfinite(logprob):
            raise WrongAnswer(f"tensorrt_llm returned log-prob {logprob} of token {token}")
        found.ids.append(token)
        found.logprobs.append(logprob if sampling.temperature else 0.0)
        found.versions.append(version)
        if sampling.top_logprobs:
            found.top.append(_likeliest(entry, sampling.top_logprobs))
    return found


def read_finish(output: Any) -> Finish | None:
    """Return why an answer ended; None while it grows or after an abort. Raises `WrongAnswer`."""
    match output.finish_reason:
        case None:
            return None
        case "stop":
            return Finish.STOP
        case "length":
            return Finish.LENGTH
        case reason if reason == _CANCELLED:
            return None
        case reason:
            raise WrongAnswer(f"tensorrt_llm ended a request for {reason!r}")


def is_cancelled(output: Any) -> bool:
    """Whether an abort ended the answer."""
    return bool(output.finish_reason == _CANCELLED)


def _likeliest(entry: Mapping[int, Any], count: int) -> Likeliest:
    ordered = sorted(((one, float(it.logprob)) for one, it in entry.items()), key=_by_logprob)
    return tuple(ordered[:count])


def _by_logprob(pair: tuple[int, float]) -> tuple[float, int]:
    return -pair[1], pair[0]


def _logprobs(library: Library, sampling: Sampling) -> int:
    if sampling.top_logprobs or Feature.SAMPLED_LOGPROB_ALONE in library.features:
        return sampling.top_logprobs
    # 0 disables them there.
    return 1


def _seed(seed: int, leg: int) -> int:
    # A different constant for each leg; 2^64 / golden ratio spreads consecutive numbers.
    return (seed + leg * 0x9E3779B97F4A7C15) % (1 << _SEED_BITS)
