"""OpenAI's completion requests: schema, checks, and prompts as token ids."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from forge.core.errors import ContextTooLong
from forge.core.token_columns import int32_bytes
from forge.v1 import common_pb2
from services.gateway.errors import InvalidField
from services.gateway.http.openai.completions.completion_fields import CompletionFields
from services.gateway.http.openai.completions.guided import guided_grammar_of
from services.gateway.http.request_fields.request_body import within
from services.gateway.model.chat_model import ChatModel

MAX_PROMPTS = 128
MAX_ANSWERS = 128
MAX_LOGPROBS = 20
DEFAULT_MAX_TOKENS = 16
"""Default of OpenAI's API."""
LARGE_TEXT_CHARS = 32_768
"""Longer texts are encoded on a thread."""


class CompletionRequest(CompletionFields, kw_only=True):
    """The used fields of a request."""

    prompt: str | list[str | int | list[int]] = ""
    """A text, token ids, or several of either."""
    logprobs: int | None = None
    """Number of likeliest tokens at each position."""
    add_special_tokens: bool | None = None
    """Special tokens of the tokenizer before a text, as its begin of text; true by default."""


async def sampling_of(request: CompletionRequest) -> common_pb2.SamplingParams:
    """Returns the sampling parameters; raises `InvalidArgument` out of range."""
    max_tokens = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    sampling = request.sampling(max_tokens)
    if request.logprobs is not None:
        sampling.top_logprobs = int(within("logprobs", request.logprobs, 0, MAX_LOGPROBS))
        if request.echo:
            raise InvalidField(
                "echo = true with logprobs is not supported: log-probs are those of sampled tokens",
                param="echo",
            )
    sampling.MergeFrom(common_pb2.SamplingParams(grammar=await guided_grammar_of(request)))
    return sampling


def answers_of(request: CompletionRequest) -> int:
    """Returns the number of answers to each prompt."""
    return int(within("n", 1 if request.n is None else request.n, 1, MAX_ANSWERS))


def prompts_of(request: CompletionRequest) -> list[str | list[int]]:
    """Returns the prompts; raises `InvalidArgument` for none, and for too many answers."""
    given = request.prompt
    prompts: list[str | list[int]] = []
    if isinstance(given, str):
        prompts = [given]
    elif given and all(isinstance(one, int) for one in given):
        prompts = [[one for one in given if isinstance(one, int)]]
    else:
        prompts = [one for one in given if not isinstance(one, int)]
        if len(prompts) < len(given):
            raise InvalidField("prompt mixes token ids with texts or lists", param="prompt")
    if not prompts or not all(prompts):
        raise InvalidField("prompt must not be empty: a text or token ids", param="prompt")
    answers = len(prompts) * answers_of(request)
    if len(prompts) > MAX_PROMPTS or answers > MAX_ANSWERS:
        raise InvalidField(
            f"{len(prompts)} prompts and {answers} answers; at most {MAX_PROMPTS} and "
            f"{MAX_ANSWERS}",
            param="prompt",
        )
    return prompts


async def prompt_ids(
    model: ChatModel, prompt: str | Sequence[int], *, special: bool, limit: int
) -> bytes:
    """Returns the int32 ids of a prompt. Raises `ContextTooLong` for a text beyond `limit` tokens,
    after work bounded by `limit`, and `InvalidArgument` for ids beyond the vocabulary."""
    if isinstance(prompt, str):
        least = model.least_tokens(prompt)
        if least >= limit:
            raise ContextTooLong.of(tokens=least, limit=limit, at_least=True)
        if len(prompt) > LARGE_TEXT_CHARS:
            tokens, ids = await asyncio.to_thread(
                model.encode_within, prompt, limit, special=special
            )
            if tokens >= limit:
                raise ContextTooLong.of(tokens=tokens, limit=limit, at_least=not ids)
            return ids
        return model.encode(prompt, special=special)
    return checked_ids("prompt", model, prompt)


def checked_ids(name: str, model: ChatModel, ids: Sequence[int]) -> bytes:
    """Returns int32 ids. Raises `InvalidArgument` for ids beyond the vocabulary."""
    if ids and not (min(ids) >= 0 and max(ids) < model.vocabulary_tokens):
        raise InvalidField(
            f"{name} must have ids from 0 to {model.vocabulary_tokens - 1}; "
            f"they are from {min(ids)} to {max(ids)}",
            param=name,
        )
    return int32_bytes(ids)
