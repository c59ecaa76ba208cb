"""Broken answers: log-probs that are not finite, and ids outside the model's vocabulary."""

from __future__ import annotations

from contextlib import suppress

from forge.core.errors import ForgeError
from forge.core.token_columns import number_outside
from forge.runtime.process.service import ServiceContext
from forge.runtime.weights import BROKEN_KEY
from services.inference.engines.base import Tokens
from services.inference.worker.metrics import BROKEN_ANSWERS, BROKEN_OUTPUTS


class BrokenOutput(ForgeError):
    """The engine returned an id outside the model's vocabulary; the message names engine and id."""


def check_ids(tokens: Tokens, vocabulary: int, *, engine: str) -> None:
    """Raise BrokenOutput for ids, sampled or among the likeliest, that are not from 0 to
    `vocabulary` - 1, and count it."""
    likeliest = [token for top in tokens.top for token, _ in top]
    for ids, what in ((tokens.ids, "sampled token"), (likeliest, "returned top_logprobs of token")):
        if (wrong := number_outside(ids, vocabulary)) is not None:
            BROKEN_OUTPUTS.inc()
            raise BrokenOutput(
                f"the engine {engine} {what} {wrong}; the vocabulary is 0 to {vocabulary - 1}"
            )


async def note_broken(context: ServiceContext) -> None:
    """Count an answer of the version in service with a log-prob that is not finite in the worker's
    metadata, by which the trainer judges a canary."""
    BROKEN_ANSWERS.inc()
    version = context.metadata.get("weight_version", "0")
    of, _, count = context.metadata.get(BROKEN_KEY, "").partition(" ")
    known = int(count) if of == version else 0
    context.metadata[BROKEN_KEY] = f"{version} {known + 1}"
    with suppress(ForgeError):  # the next announcement has it
        await context.announce()
