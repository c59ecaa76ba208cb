"""Answers that stop in the middle until a test lets them end.

What a test does in mid-answer, such as a swap of weights, is done before the answer ends, however
slow it is. Not here: passes of prefill (`hand_off`), and vLLM, whose steps are in another process.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from services.inference.engines.embedded.decode import DecodeActor
from services.inference.engines.embedded.messages import Join
from services.inference.engines.embedded.sequences import DecodeSequence
from tests.support.inference.tensorrt_llm_fake.core import Core, Request
from tests.support.runtime.waiting import until

_PAUSE_S = 0.001


class HeldAnswers:
    """Whether the engines of this process stop at a number of tokens; others can be aborted, or get
    other weights, meanwhile."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._free = threading.Event()
        self.joined = 0
        """Requests that have come to an embedded engine to sample, also those that it refused."""

    def free(self) -> None:
        """Lets all answers end."""
        self._free.set()

    async def has(self, requests: int) -> None:
        """Returns once so many have come."""
        await until(lambda: self.joined >= requests)

    def holds(self, tokens: int) -> bool:
        """Whether an answer of so many tokens gets no further one."""
        return tokens >= self._tokens and not self._free.is_set()


@contextmanager
def held_answers(tokens: int) -> Iterator[HeldAnswers]:
    """Around requests: their answers stop at `tokens` tokens. All before are sent."""
    held = HeldAnswers(tokens)
    run_step, join = DecodeActor._run_step, DecodeActor._join
    advance, is_due = Core._advance, DecodeSequence.is_due

    def counted_join(actor: DecodeActor, message: Join) -> None:
        try:
            join(actor, message)
        finally:
            held.joined += 1

    def step(actor: DecodeActor) -> None:
        if any(held.holds(len(one.sampled)) for one in actor._running):
            time.sleep(_PAUSE_S)
        else:
            run_step(actor)

    def due(sequence: DecodeSequence, now_s: float) -> bool:
        return held.holds(len(sequence.sampled)) or is_due(sequence, now_s)

    def advance_request(core: Core, request: Request) -> bool:
        if not request.aborted and held.holds(len(request.output.token_ids)):
            time.sleep(_PAUSE_S)
            return False
        return advance(core, request)

    with (
        mock.patch.object(DecodeActor, "_run_step", step),
        mock.patch.object(DecodeActor, "_join", counted_join),
        mock.patch.object(DecodeSequence, "is_due", due),
        mock.patch.object(Core, "_advance", advance_request),
    ):
        try:
            yield held
        finally:
            held.free()
