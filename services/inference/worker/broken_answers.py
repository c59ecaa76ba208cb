"""Answers of the version in service that ended with a log-prob that is not finite."""

from __future__ import annotations

from contextlib import suppress

from forge.core.errors import ForgeError
from forge.runtime.process.service import ServiceContext
from forge.runtime.weights import BROKEN_KEY
from services.inference.worker.metrics import BROKEN_ANSWERS


async def note_broken(context: ServiceContext) -> None:
    """Count one in the worker's metadata, by which the trainer judges a canary."""
    BROKEN_ANSWERS.inc()
    version = context.metadata.get("weight_version", "0")
    of, _, count = context.metadata.get(BROKEN_KEY, "").partition(" ")
    known = int(count) if of == version else 0
    context.metadata[BROKEN_KEY] = f"{version} {known + 1}"
    with suppress(ForgeError):  # the next announcement has it
        await context.announce()
