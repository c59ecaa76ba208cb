"""Converts between protos and the types of the engines, and checks requests. No torch, no I/O."""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import replace

from forge.core.enum_words import enum_name
from forge.core.errors import InvalidArgument, Unavailable
from forge.core.sampling_limits import MIN_REPETITION_PENALTY, effective_temperature
from forge.core.token_columns import (
    TOKEN_BYTES,
    float32_array,
    float32_bytes,
    int32_array,
    int32_bytes,
    number_outside,
    outside,
)
from forge.runtime.rpc.routes import read_routes, write_routes
from forge.v1.common_pb2 import (
    FINISH_REASON_LENGTH,
    FINISH_REASON_STOP,
    FINISH_REASON_UNSPECIFIED,
    FinishReason,
    SampledTokens,
    SamplingParams,
)
from forge.v1.inference_pb2 import (
    DecodeRequest,
    PrefillRequest,
    SampleRequest,
)
from services.inference.engines.base import (
    Finish,
    Grammar,
    Likeliest,
    ModelLimits,
    Prompt,
    Reweighting,
    Sampling,
    Tokens,
)

_FINISH = {
    Finish.STOP: FINISH_REASON_STOP,
    Finish.LENGTH: FINISH_REASON_LENGTH,
    None: FINISH_REASON_UNSPECIFIED,
}
MAX_BIASES = 4096
MAX_REPETITION_PENALTY = 10.0
MAX_TOP_LOGPROBS = 20
"""Largest value of OpenAI's protocol."""
_FROM_FINISH = {reason: finish for finish, reason in _FINISH.items()}


def read_prompt(
    request: SampleRequest | PrefillRequest | DecodeRequest,
    limits: ModelLimits,
    *,
    seed: int | None = None,
) -> Prompt:
    """Return the checked prompt; `seed`, or a random one, replaces an absent seed. Raises
    InvalidArgument."""
    check_ids(request.prompt_ids, limits)
    sampling = read_sampling(request.sampling, seed=seed)
    tokens = len(request.prompt_ids) // TOKEN_BYTES
    if sampling.grammar is not None and sampling.grammar.matched_tokens > tokens:
        raise InvalidArgument(
            f"sampling.grammar.matched_tokens = {sampling.grammar.matched_tokens}: "
            f"the prompt has {tokens} tokens"
        )
    if request.sampling.answered_tokens > tokens:
        raise InvalidArgument(
            f"sampling.answered_tokens = {request.sampling.answered_tokens}: "
            f"the prompt has {tokens} tokens"
        )
    check_tokens("sampling.logit_bias", list(request.sampling.logit_bias), limits)
    return Prompt(request_id=request.request_id, ids=request.prompt_ids, sampling=sampling)


def check_ids(prompt_ids: bytes, limits: ModelLimits) -> None:
    """Raises InvalidArgument for an empty or too long prompt, and for ids beyond the vocabulary."""
    if len(prompt_ids) % TOKEN_BYTES:
        raise InvalidArgument(
            f"prompt_ids has {len(prompt_ids)} bytes: not a whole number of int32"
        )
    tokens = len(prompt_ids) // TOKEN_BYTES
    if tokens == 0:
        raise InvalidArgument("prompt_ids is empty; at least one token is needed")
    if tokens >= limits.context_tokens:
        raise InvalidArgument(
            f"prompt_ids has {tokens} tokens; the context of {limits.context_tokens} tokens "
            f"holds a prompt of at most {limits.context_tokens - 1}"
        )
    if (wrong := outside(prompt_ids, limits.vocabulary)) is not None:
        raise InvalidArgument(
            f"prompt_ids has token {wrong}; the vocabulary is 0 to {limits.vocabulary - 1}"
        )


def check_tokens(field: str, ids: Sequence[int], limits: ModelLimits) -> None:
    """Raises InvalidArgument for ids beyond the vocabulary."""
    if (wrong := number_outside(ids, limits.vocabulary)) is not None:
        raise InvalidArgument(
            f"{field} has token {wrong}; the vocabulary is 0 to {limits.vocabulary - 1}"
        )


def read_sampling(params: SamplingParams, *, seed: int | None = None) -> Sampling:
    """Return checked sampling parameters; `seed` as of `read_prompt`. Raises InvalidArgument."""
    if params.HasField("seed"):
        seed = params.seed
    elif seed is None:
        seed = secrets.randbits(64)
    temperature = params.temperature if params.HasField("temperature") else 1.0
    if not (math.isfinite(temperature) and temperature >= 0):
        raise InvalidArgument(f"sampling.temperature = {temperature}: must be finite, at least 0")
    top_p = params.top_p if params.HasField("top_p") else 1.0
    if not 0 < top_p <= 1:
        raise InvalidArgument(f"sampling.top_p = {top_p}: must be above 0 and at most 1")
    if params.max_tokens < 1:
        raise InvalidArgument(f"sampling.max_tokens = {params.max_tokens}: must be at least 1")
    if params.top_logprobs > MAX_TOP_LOGPROBS:
        raise InvalidArgument(
            f"sampling.top_logprobs = {params.top_logprobs}: must be at most {MAX_TOP_LOGPROBS}"
        )
    if params.min_tokens > params.max_tokens:
        raise InvalidArgument(
            f"sampling.min_tokens = {params.min_tokens}: must be at most max_tokens = "
            f"{params.max_tokens}"
        )
    return Sampling(
        temperature=effective_temperature(temperature),
        top_p=top_p,
        top_k=params.top_k,
        max_tokens=params.max_tokens,
        stop_ids=frozenset(params.stop_token_ids),
        seed=seed,
        grammar=_read_grammar(params) if params.HasField("grammar") else None,
        top_logprobs=params.top_logprobs,
        min_tokens=params.min_tokens,
        min_p=_within("min_p", params.min_p, 0.0, 1.0),
        reweighting=_read_reweighting(params),
        routes_from=params.routes_from if params.HasField("routes_from") else None,
    )


def _read_reweighting(params: SamplingParams) -> Reweighting | None:
    """Return None for neutral values. Raises InvalidArgument."""
    penalizes = params.presence_penalty or params.frequency_penalty
    if not (penalizes or params.HasField("repetition_penalty") or params.logit_bias):
        return None
    repetition = params.repetition_penalty if params.HasField("repetition_penalty") else 1.0
    _within("repetition_penalty", repetition, MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY)
    if len(params.logit_bias) > MAX_BIASES:
        raise InvalidArgument(
            f"sampling.logit_bias has {len(params.logit_bias)} ids; at most {MAX_BIASES}"
        )
    for token, bias in params.logit_bias.items():
        _within(f"logit_bias[{token}]", bias, -100.0, 100.0)
    found = Reweighting(
        presence=_within("presence_penalty", params.presence_penalty, -2.0, 2.0),
        frequency=_within("frequency_penalty", params.frequency_penalty, -2.0, 2.0),
        repetition=repetition,
        bias=tuple(sorted(params.logit_bias.items())),
    )
    if found == Reweighting():
        return None
    return replace(found, answered_tokens=params.answered_tokens)


def _within(name: str, value: float, low: float, high: float) -> float:
    # In this form NaN is refused, too.
    if not low <= value <= high:
        raise InvalidArgument(f"sampling.{name} = {value}: must be from {low:g} to {high:g}")
    return value


def _read_grammar(params: SamplingParams) -> Grammar:
    kind = params.grammar.WhichOneof("kind")
    if kind is None:
        raise InvalidArgument("sampling.grammar has no kind: json_schema, regex or lark is needed")
    if not params.stop_token_ids:
        raise InvalidArgument(
            "sampling.grammar needs sampling.stop_token_ids: only a stop token may follow a "
            "complete answer"
        )
    return Grammar(
        kind=kind,
        text=getattr(params.grammar, kind),
        lenient=params.grammar.lenient,
        matched_tokens=params.grammar.matched_tokens,
    )


def sampling_of_rest(
    params: SamplingParams, *, seed: int, max_tokens: int, sampled_tokens: int, routes_to: int = 0
) -> SamplingParams:
    """Return the parameters with which a worker continues an answer after `sampled_tokens`; a
    grammar continues after its matched tokens, penalties count all of the answer. The experts of
    the tokens before `routes_to` are known."""
    rest = SamplingParams()
    rest.CopyFrom(params)
    rest.seed, rest.max_tokens = seed, max_tokens
    # The context may have less room than the request asks for.
    rest.min_tokens = min(max(0, params.min_tokens - sampled_tokens), max_tokens)
    if sampled_tokens and _read_reweighting(params) is not None:
        rest.answered_tokens += sampled_tokens
    if rest.HasField("routes_from"):
        rest.routes_from = max(rest.routes_from, routes_to)
    if rest.HasField("grammar"):
        rest.grammar.matched_tokens += sampled_tokens
    return rest


def write_tokens(tokens: Tokens) -> SampledTokens:
    """Encode sampled tokens."""
    return SampledTokens(
        ids=int32_bytes(tokens.ids),
        logprobs=float32_bytes(tokens.logprobs),
        weight_versions=int32_bytes(tokens.versions),
        allowed_logprobs=float32_bytes(tokens.allowed),
        top_ids=int32_bytes([token for top in tokens.top for token, _ in top]),
        top_logprobs=float32_bytes([logprob for top in tokens.top for _, logprob in top]),
        routed_experts=write_routes(tokens.routes) if tokens.routes else None,
    )


def read_tokens(tokens: SampledTokens) -> Tokens:
    """Decode sampled tokens. Raises InvalidArgument for columns of different lengths."""
    columns = [tokens.ids, tokens.logprobs, tokens.weight_versions]
    if tokens.allowed_logprobs:
        columns.append(tokens.allowed_logprobs)
    if len({len(column) for column in columns}) != 1 or len(tokens.ids) % TOKEN_BYTES:
        raise InvalidArgument(
            f"columns disagree in length: {[len(column) for column in columns]} bytes"
        )
    return Tokens(
        ids=tuple(int32_array(tokens.ids)),
        logprobs=tuple(float32_array(tokens.logprobs)),
        versions=tuple(int32_array(tokens.weight_versions)),
        allowed=tuple(float32_array(tokens.allowed_logprobs)),
        top=_read_top(tokens),
        routes=read_routes(tokens.routed_experts),
    )


def _read_top(tokens: SampledTokens) -> tuple[Likeliest, ...]:
    if not tokens.top_ids and not tokens.top_logprobs:
        return ()
    ids, logprobs, sampled = len(tokens.top_ids), len(tokens.top_logprobs), len(tokens.ids)
    if ids != logprobs or not sampled or ids % sampled:
        raise InvalidArgument(
            f"columns top_ids ({ids} bytes) and top_logprobs ({logprobs} bytes) do not fit "
            f"the likeliest of {sampled // TOKEN_BYTES} tokens"
        )
    each = ids // sampled
    pairs = list(zip(int32_array(tokens.top_ids), float32_array(tokens.top_logprobs), strict=True))
    return tuple(tuple(pairs[at : at + each]) for at in range(0, len(pairs), each))


def write_finish(finish: Finish | None) -> FinishReason.ValueType:
    """Encode a finish reason."""
    return _FINISH[finish]


def read_finish(reason: FinishReason.ValueType) -> Finish | None:
    """Decode a finish reason. Raises Unavailable for one that only a newer worker has: another
    worker continues the answer behind its tokens."""
    if reason not in _FROM_FINISH:
        name = enum_name(FinishReason, reason)
        raise Unavailable(f"a worker ended its answer with {name}, which this router does not know")
    return _FROM_FINISH[reason]
